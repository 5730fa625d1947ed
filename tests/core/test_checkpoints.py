"""States kept after full blocks: sequences of models with recurrent state go on from there. Block size 16.

The fake runner asserts that each state has taken in the tokens before its row, no more and no fewer.
"""

import random

import pytest

from tests.core.builders import Engine, expected_hypotheses, expected_output, make_group, make_sequence
from worker.core.cache.checkpoints import Checkpoints
from worker.core.config import CacheConfig
from worker.core.errors import ConfigError
from worker.core.params import BeamParams

TURN = list(range(100, 140))
"""40 tokens: a checkpoint after 32."""


def make_engine(num_checkpoints: int = 4, **settings: object) -> Engine:
    return Engine(num_groups=8, num_checkpoints=num_checkpoints, **settings)


def run(engine: Engine, id: int, prompt: list[int]) -> int:
    """Cached tokens of a sequence that is run alone; its output is what it should be."""
    seq = make_sequence(id, prompt, 3)
    wanted = expected_output(seq, 256)[0]
    engine.add(seq)
    engine.run()
    assert engine.tokens[id] == wanted
    return engine.ended[id].num_cached_tokens


@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix", ["hash", "radix"])
def test_equal_prompt_goes_on_from_its_last_full_block(policy: str, depth: int, prefix: str) -> None:
    engine = make_engine(scheduling_policy=policy, async_depth=depth, prefix=prefix)
    assert [run(engine, id, TURN) for id in (1, 2)] == [0, 32]
    assert [batch.num_scheduled_tokens for batch in engine.batches][:2] == [[32], [8]]
    engine.assert_drained()


def test_prompt_of_whole_blocks_leaves_one_to_compute() -> None:
    engine = make_engine()
    assert [run(engine, id, TURN[:32]) for id in (1, 2)] == [0, 16]


def test_single_token_after_the_checkpoint() -> None:
    """The row after it is one of those that decode."""
    engine = make_engine()
    assert [run(engine, id, TURN[:33]) for id in (1, 2)] == [0, 32]


def test_longer_prompt_goes_on_from_a_shorter_one() -> None:
    engine = make_engine()
    assert [run(engine, 1, TURN), run(engine, 2, TURN + TURN)] == [0, 32]


def test_beginning_that_two_share_is_kept_by_the_second() -> None:
    """The first left its state at its own end alone; nothing of it serves another ending. The third finds both."""
    engine = make_engine()
    prompts = [TURN + [id] * 40 for id in (1, 2, 3)]
    assert [run(engine, id, prompt) for id, prompt in enumerate(prompts)] == [0, 0, 32]


@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("depth", [0, 1])
def test_who_waits_for_a_beginning_gets_the_state_after_it(policy: str, depth: int) -> None:
    """A prompt comes in over several steps; whoever begins alike waits, and its state is kept where they part."""
    engine = make_engine(scheduling_policy=policy, async_depth=depth, max_prefill_chunk=16)
    group = [make_sequence(id, TURN + [id] * 40, 3) for id in (1, 2, 3)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.add(*group)
    engine.run()
    assert engine.tokens == wanted
    assert [engine.ended[id].num_cached_tokens for id in (1, 2, 3)] == [0, 32, 32]


def test_blocks_without_a_state_are_computed_again() -> None:
    engine = make_engine()
    assert [run(engine, 1, TURN + TURN), run(engine, 2, TURN)] == [0, 0]
    assert run(engine, 3, TURN) == 32, "found under the block that the first has published"


def test_state_used_longest_ago_gives_way() -> None:
    engine = make_engine(num_checkpoints=2)
    for id in (1, 2, 1, 3):
        run(engine, 10 * len(engine.ended) + id, [id] * 20)
    assert run(engine, 101, [1] * 20) == 16, "used last but one"
    assert run(engine, 102, [2] * 20) == 0, "gave way to the third"


def test_state_goes_with_its_block() -> None:
    engine = make_engine(num_blocks=4)
    run(engine, 1, TURN)
    run(engine, 2, list(range(60)))
    assert run(engine, 3, TURN) == 0
    assert len(engine.scheduler._blocks.checkpoints._group_of) == 1


def test_cleared_cache_has_no_states() -> None:
    engine = make_engine()
    run(engine, 1, TURN)
    engine.scheduler.clear_prefix_cache()
    assert len(engine.scheduler._blocks.checkpoints._free) == 4
    assert run(engine, 2, TURN) == 0


def test_group_of_an_aborted_sequence_may_have_a_new_owner_when_its_state_is_copied() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(make_sequence(1, TURN, 3))
    engine.step()
    engine.scheduler.abort(1)
    engine.add(make_sequence(2, TURN, 3))
    engine.run()
    assert engine.ended[2].num_cached_tokens == 32
    assert [new.group_id for batch in engine.batches for new in batch.new_sequences] == [0, 0]


@pytest.mark.parametrize("depth", [0, 1])
def test_members_of_a_request_compute_the_prompt_once(depth: int) -> None:
    engine = make_engine(async_depth=depth)
    group = make_group(1, TURN, 3, 4)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
    assert engine.runner.num_tokens == 32 + 3 * (8 + 3)


def test_what_is_not_finite_is_never_gone_on_from() -> None:
    engine = make_engine()
    engine.runner.broken_tokens = {TURN[3]}
    engine.add(make_sequence(1, TURN, 3))
    engine.run()
    engine.runner.broken_tokens = set()
    assert run(engine, 2, TURN) == 0
    assert run(engine, 3, TURN) == 32


@pytest.mark.parametrize("seed", range(12))
def test_streams_survive_random_traffic(seed: int) -> None:
    rnd = random.Random(seed)
    engine = Engine(
        num_groups=5,
        num_checkpoints=rnd.randrange(1, 5),
        max_num_seqs=5,
        num_blocks=rnd.randrange(8, 14),
        async_depth=seed % 2,
        prefix=rnd.choice(["hash", "radix"]),
        scheduling_policy=rnd.choice(["prefill_first", "chunked"]),
        max_prefill_chunk=rnd.choice([0, 11, 16]),
        max_num_batched_tokens=96,
    )
    wanted, searches = {}, {}
    ids = iter(range(1, 2000, 10))
    for _ in range(100):
        if rnd.random() < 0.4:
            prompt = TURN[: rnd.choice([5, 20, 40])] + [rnd.randrange(3)] * rnd.randrange(1, 30)
            group = make_group(next(ids), prompt, rnd.choice([1, 1, 3]), rnd.randrange(1, 40))
            wanted |= {seq.id: expected_output(seq, 256)[0] for seq in group}
            engine.scheduler.add_group(group)
        if rnd.random() < 0.1:
            search = make_sequence(next(ids), rnd.randrange(1, 13), 20, beam=BeamParams(width=rnd.randrange(2, 5)))
            searches[search.id] = expected_hypotheses(search, 256)
            engine.add(search)
        if wanted and rnd.random() < 0.2:
            engine.scheduler.abort(rnd.choice(list(wanted)))
        engine.runner.failing_slots = {0} if rnd.random() < 0.03 else set()
        engine.step()
    engine.runner.failing_slots = set()
    engine.run()
    assert engine.ended.keys() == wanted.keys() | searches.keys()
    for id, hypotheses in searches.items():
        ended = engine.ended.pop(id)
        assert ended.hypotheses == hypotheses or ended.finish_reason.name == "ERROR"
    for id, ended in engine.ended.items():
        tokens = wanted[id] if ended.finish_reason.name == "LENGTH" else wanted[id][: len(engine.tokens.get(id, []))]
        assert engine.tokens.get(id, []) == tokens
    engine.assert_drained()
    assert engine.scheduler.load().num_prefix_hits > 0


def test_state_of_this_step_is_not_used_within_it() -> None:
    checkpoints = Checkpoints(range(8, 10))
    checkpoints.begin_step()
    assert (checkpoints.add(5), checkpoints.add(5)) == (8, None)
    assert checkpoints.num_usable([4, 5, 6]) == 0
    checkpoints.begin_step()
    assert (checkpoints.num_usable([4, 5, 6]), checkpoints.use(5)) == (2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_checkpoints": 0}, "enable_prefix_caching"),
        ({"num_groups": 0}, "num_checkpoints"),
        ({"secure": True}, "num_checkpoints"),
        ({"enable_prefix_caching": False}, "num_checkpoints"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**({"num_blocks": 8, "num_groups": 4, "num_checkpoints": 2} | changes))
