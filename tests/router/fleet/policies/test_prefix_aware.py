"""The default policy: exact picks by cache and load."""

import random
from collections import Counter

import pytest

from fissile.v1 import WorkerLoad
from router.fleet.policies.policy import Work
from router.fleet.policies.prefix_aware import PrefixAware
from router.fleet.prefixes.prefixes import Prefixes
from tests.router.fleet.policies.workers import Worker, chosen, workers

PROMPT = list(range(1, 1001))


class Fleet:
    """Workers, and what is known of their caches; blocks of four tokens."""

    def __init__(self, *open_counts, **prompts):
        """`prompts`: by worker, what it has."""
        self.workers = workers(*open_counts)
        self.prefixes = Prefixes(1 << 24)
        self.views = {w.address: self.prefixes.follow(w.session, 4) for w in self.workers}
        self.policy = PrefixAware(self.prefixes, random.Random(3))
        for name, tokens in prompts.items():
            self.cache(name, tokens)

    def __getitem__(self, name) -> Worker:
        return next(w for w in self.workers if w.address == name)

    def cache(self, name, tokens, salt=b""):
        self.views[name].store(list(Work(tokens, salt).block_hashes(4, len(tokens) // 4)))

    def picks(self, times=1, tokens=PROMPT, **fields) -> str:
        return chosen(self.policy, self.workers, times, Work(tokens, **fields))

    def send(self, tokens=PROMPT):
        """Choose and count, as the dispatcher does."""
        choice = self.policy.choose(Work(tokens), self.workers)
        choice.worker.open(1, len(tokens) - choice.num_cached_tokens)
        return choice


def test_the_longest_cached_prefix_wins():
    assert Fleet(0, 0, 0, a=PROMPT[:400], b=PROMPT[:500], c=[9, *PROMPT]).picks(9) == "b" * 9


def test_equals_are_drawn_at_random():
    assert set(Fleet(0, 0, 0).picks(30)) == set("abc")
    assert set(Fleet(0, 0, 0, a=PROMPT[:900], c=PROMPT[:900]).picks(30)) == set("ac")


def test_costs_that_differ_by_less_than_a_sequence_are_equal():
    """Blocks that every prompt begins with say nothing."""
    assert set(Fleet(0, 0, a=PROMPT[:16]).picks(30)) == set("ab")
    assert set(Fleet(0, 0, a=PROMPT[:20]).picks(30)) == {"a"}


def test_a_sequence_more_is_no_equal():
    assert Fleet(1, 0, 1).picks(9) == "b" * 9


def test_what_waits_for_its_prefill_outweighs_half_as_much_that_is_cached():
    fleet = Fleet(0, 0, a=PROMPT[:800])
    fleet["a"].open(1, 1400)
    assert fleet.picks(9) == "a" * 9
    fleet["a"].open(1, 200)
    assert fleet.picks(9) == "b" * 9


def test_prompts_of_another_router_count():
    fleet = Fleet(0, 0, a=PROMPT[:800])
    fleet["a"].load.reported(WorkerLoad(num_waiting=1, num_waiting_tokens=1700))
    assert fleet.picks(9) == "b" * 9


def test_tokens_in_the_cache_count_a_quarter():
    fleet = Fleet(0, 0)
    fleet["a"].load.reported(WorkerLoad(num_running=1, num_used_blocks=100, num_blocks=1000))
    fleet["b"].load.reported(WorkerLoad(num_running=1, num_used_blocks=50, num_blocks=1000))
    assert fleet.picks(9) == "b" * 9


def test_a_worker_whose_cache_is_full_comes_last_unless_all_are():
    fleet = Fleet(0, 5, a=PROMPT)
    fleet["a"].load.reported(WorkerLoad(num_blocks=100, num_used_blocks=99))
    assert fleet.picks(9) == "a" * 9, "what is cached needs no room"
    assert fleet.picks(9, tokens=PROMPT[500:]) == "b" * 9
    fleet["b"].load.reported(WorkerLoad(num_blocks=100, num_used_blocks=99, num_running=5))
    assert fleet.picks(9, tokens=PROMPT[500:]) == "a" * 9


def test_a_worker_that_runs_all_it_can_comes_last_unless_all_do():
    """Two of eight places each: costs that are nearly equal must not give one of them nine sequences."""
    fleet = Fleet(8, 0, a=PROMPT)
    fleet["a"].load.max_num_seqs = fleet["b"].load.max_num_seqs = 8
    fleet["b"].open(7, 100_000)
    assert fleet.send().worker.address == "b"
    assert fleet.send().worker.address == "a", "both have eight: what is cached counts again"
    assert {worker.address: worker.load.num_sequences for worker in fleet.workers} == {"a": 9, "b": 8}


def test_overload_beats_affinity():
    """1.25 × mean + 2 open sequences; the prompt is worth many more."""
    fleet = Fleet(4, 1, 1, a=PROMPT)
    assert fleet.picks(9) == "a" * 9
    fleet = Fleet(5, 1, 1, a=PROMPT)
    assert set(fleet.picks(9)) == {"b", "c"}


@pytest.mark.parametrize("num_at_once", [1, 8, 100])
def test_a_prefix_that_all_share_makes_no_hot_spot(num_at_once):
    """1,000 requests over 8 workers; those open at once are spread as well as those sent one after the other."""
    fleet = Fleet(*[0] * 8)
    open_now = []
    counts = Counter()
    for number in range(1000):
        prompt = [*PROMPT, number]
        choice = fleet.send(prompt)
        fleet.cache(choice.worker.address, prompt)
        counts[choice.worker.address] += 1
        open_now.append(choice.worker)
        if len(open_now) == num_at_once:
            worker = open_now.pop(0)
            worker.load.closed(next(iter(worker.load._prefills)))
    assert 8 * max(counts.values()) / 1000 < 1.5


def test_what_is_expected_to_be_cached_is_said():
    fleet = Fleet(0, a=PROMPT)
    assert fleet.send(PROMPT).num_cached_tokens == 996, "the last token is always computed"
    assert fleet.send([*PROMPT, 5]).num_cached_tokens == 1000
    assert fleet["a"].load.num_prefill_tokens == 4 + 1
    assert fleet.send([]).num_cached_tokens == 0


def test_a_salt_separates():
    fleet = Fleet(0, 0, a=PROMPT)
    fleet.cache("b", PROMPT, b"tenant")
    assert fleet.picks(9) == "a" * 9
    assert fleet.picks(9, cache_salt=b"tenant") == "b" * 9
    assert set(fleet.picks(30, cache_salt=b"other")) == set("ab")


def test_who_asks_for_log_probabilities_of_the_prompt_finds_nothing_cached():
    assert set(Fleet(0, 0, a=PROMPT).picks(30, reads_cache=False)) == set("ab")


def test_workers_of_different_block_sizes_are_compared_in_tokens():
    small, large = workers(0, 0)
    large.load.block_size = 32
    prefixes = Prefixes(1 << 20)
    for worker, size, num_tokens in ((small, 4, 200), (large, 32, 320)):
        view = prefixes.follow(worker.session, size)
        view.store(list(Work(PROMPT).block_hashes(size, num_tokens // size)))
    policy = PrefixAware(prefixes, random.Random(3))
    assert chosen(policy, [small, large], 9, Work(PROMPT)) == "b" * 9
    assert policy.choose(Work(PROMPT[:320]), [small, large]).num_cached_tokens == 288


def test_without_events_what_was_sent_is_taken_to_be_cached():
    fleet = workers(0, 0, 0)
    prefixes = Prefixes(1 << 20)
    for worker in fleet:
        prefixes.keep_history(worker.session, 4, 300)
    policy = PrefixAware(prefixes, random.Random(3))
    first = policy.choose(Work(PROMPT), fleet)
    again = policy.choose(Work([*PROMPT, 7]), fleet)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 1000)
    assert again.worker is first.worker


def test_a_history_holds_no_more_than_the_workers_cache():
    (worker,) = workers(0)
    prefixes = Prefixes(1 << 20)
    prefixes.keep_history(worker.session, 4, 300)
    policy = PrefixAware(prefixes, random.Random(3))
    policy.choose(Work(PROMPT), [worker])
    policy.choose(Work([9, *PROMPT]), [worker])
    assert prefixes.index.num_blocks <= 300
    assert policy.choose(Work([9, *PROMPT]), [worker]).num_cached_tokens == 1000
    assert policy.choose(Work(PROMPT), [worker]).num_cached_tokens < 400


def test_what_is_known_of_a_worker_is_not_taken_for_its_successor():
    fleet = Fleet(0, 0, a=PROMPT)
    fleet.prefixes.forget(fleet["a"].session)
    assert set(fleet.picks(30)) == set("ab")
    assert fleet.prefixes.index.num_blocks == 0
