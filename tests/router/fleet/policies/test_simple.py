"""The policies that know nothing of prompts: exact picks."""

import random
from collections import Counter

from router.fleet.policies.catalogue import make_policy
from router.fleet.policies.chance import PowerOfTwo, RandomChoice
from router.fleet.policies.consistent_hash import ConsistentHash
from router.fleet.policies.least_loaded import LeastLoaded
from router.fleet.policies.policy import Work
from router.fleet.policies.round_robin import RoundRobin
from router.fleet.prefixes.prefixes import Prefixes
from tests.router.fleet.policies.workers import NOTHING, chosen, workers


def keyed(key: str) -> Work:
    return Work((), routing_key=key)


def test_round_robin_takes_turns():
    assert chosen(RoundRobin(), workers(0, 5, 0), 7) == "abcabca"


def test_round_robin_goes_on_in_order_when_workers_come_and_go():
    policy = RoundRobin()
    a, b, c = workers(0, 0, 0)
    assert chosen(policy, [a, b, c], 2) == "ab"
    assert chosen(policy, [a, c], 2) == "ca"
    assert chosen(policy, [c, b, a], 2) == "bc"


def test_least_loaded_takes_the_fewest():
    assert chosen(LeastLoaded(), workers(3, 1, 2), 3) == "bbb"


def test_least_loaded_equals_take_turns():
    assert chosen(LeastLoaded(), workers(1, 1, 4), 4) == "abab"


def test_counting_before_sending_spreads_a_burst():
    policy = LeastLoaded()
    candidates = workers(0, 0, 0, 0)
    for _ in range(100):
        policy.choose(NOTHING, candidates).worker.open()
    assert [w.load.num_sequences for w in candidates] == [25] * 4


def test_random_draws():
    expected = random.Random(7)
    picks = "".join(expected.choice("abc") for _ in range(9))
    assert chosen(RandomChoice(random.Random(7)), workers(9, 0, 0), 9) == picks


def test_power_of_two_takes_the_less_loaded_of_two():
    expected = random.Random(7)
    loads = {"a": 3, "b": 0, "c": 2, "d": 1}
    pairs = [expected.sample("abcd", 2) for _ in range(9)]
    picks = chosen(PowerOfTwo(random.Random(7)), workers(*loads.values()), 9)
    assert picks == "".join(min(pair, key=loads.__getitem__) for pair in pairs)
    assert "a" not in picks


def test_power_of_two_of_one_is_that_one():
    assert chosen(PowerOfTwo(random.Random(7)), workers(5)) == "a"


def test_a_key_keeps_its_worker_when_another_one_goes():
    policy = ConsistentHash()
    candidates = workers(0, 0, 0, 0)
    before = {key: chosen(policy, candidates, work=keyed(str(key))) for key in range(200)}
    after = {key: chosen(policy, candidates[:3], work=keyed(str(key))) for key in range(200)}
    assert all(after[key] == before[key] for key in before if before[key] != "d")
    shares = Counter(before.values())
    assert set(shares) == set("abcd") and max(shares.values()) < 70


def test_two_routers_agree_on_a_key():
    keys = [keyed(f"user {i}") for i in range(50)]
    first, second = ConsistentHash(), ConsistentHash()
    candidates = workers(0, 0, 0)
    assert [chosen(first, candidates, work=key) for key in keys] == [
        chosen(second, candidates[::-1], work=key) for key in keys
    ]


def test_a_key_never_fills_a_worker_beyond_the_bound():
    """1.25 × mean + 4."""
    policy = ConsistentHash()
    candidates = workers(0, 0, 0, 0)
    for _ in range(100):
        policy.choose(keyed("hot"), candidates).worker.open()
    assert max(w.load.num_sequences for w in candidates) <= 1.25 * 25 + 5


def test_without_a_key_the_beginning_of_the_prompt_counts():
    policy = ConsistentHash()
    candidates = workers(*[0] * 8)
    beginning = list(range(256))
    same = {chosen(policy, candidates, work=Work([*beginning, i])) for i in range(20)}
    others = {chosen(policy, candidates, work=Work([i, *beginning])) for i in range(20)}
    salted = {chosen(policy, candidates, work=Work(beginning, bytes([i]))) for i in range(20)}
    assert len(same) == 1 and len(others) > 1 and len(salted) > 1


def test_a_key_goes_before_any_policy():
    policy = make_policy("round_robin", Prefixes(1 << 20))
    candidates = workers(0, 0, 0)
    assert len({chosen(policy, candidates, work=keyed("k")) for _ in range(9)}) == 1
    assert chosen(policy, candidates, 3) == "abc"
