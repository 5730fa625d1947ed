"""A row that could not be sampled: its sequence ends, and nobody finds what it computed."""

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from worker.core.kv_events import BlockRemoved, BlockStored
from worker.core.params import BeamParams
from worker.core.sequence import FinishReason

BOTH_INDEXES = pytest.mark.parametrize("prefix", ["hash", "radix"])
BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])
TOKENS = list(range(500, 600))


def fail_next_step(engine: Engine, slot: int = 0) -> None:
    engine.runner.failing_slots = {slot}
    engine.submit()
    engine.runner.failing_slots = set()
    while engine.pending:
        engine.retire()


@BOTH_INDEXES
def test_earlier_chunks_of_a_failed_prompt_are_not_found(prefix: str) -> None:
    engine = Engine(prefix=prefix, scheduling_policy="chunked", max_num_batched_tokens=16)
    engine.add(make_sequence(1, TOKENS[:40], 5))
    engine.step()
    engine.step()
    fail_next_step(engine)
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    assert engine.scheduler.load().num_blocks_cached == 0
    engine.add(again := make_sequence(2, TOKENS[:40], 1))
    engine.run()
    assert again.num_cached_tokens == 0


@BOTH_INDEXES
@BOTH_DEPTHS
def test_blocks_published_before_a_failing_decode_are_not_found(prefix: str, depth: int) -> None:
    engine = Engine(prefix=prefix, async_depth=depth)
    engine.add(make_sequence(1, TOKENS[:30], 20))
    for _ in range(5):
        engine.step()
    while engine.pending:
        engine.retire()
    assert engine.scheduler._blocks.index.holds(1)
    fail_next_step(engine)
    assert engine.scheduler.load().num_blocks_cached == 0
    engine.assert_drained()


@BOTH_INDEXES
def test_what_others_had_computed_stays(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:33], 1))
    engine.run()
    engine.add(make_sequence(2, TOKENS[:60], 20))
    engine.step()
    fail_next_step(engine)
    assert engine.scheduler.load().num_blocks_cached == 2
    engine.add(again := make_sequence(3, TOKENS[:60], 1))
    engine.run()
    assert again.num_cached_tokens == 32


@BOTH_INDEXES
def test_holder_of_a_withdrawn_block_goes_on(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:40], 20))
    engine.step()
    engine.add(other := make_sequence(2, TOKENS[:50], 20))
    wanted, _ = expected_output(other, 256)
    engine.step()
    fail_next_step(engine)
    engine.run()
    assert engine.tokens[2] == wanted
    engine.assert_drained()


@BOTH_INDEXES
def test_withdrawal_is_told_and_is_no_eviction(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    engine.add(make_sequence(1, TOKENS[:40], 20))
    engine.step()
    fail_next_step(engine)
    news = [event for _, event in events.since(0)]
    assert [type(event) for event in news] == [BlockStored, BlockStored, BlockRemoved, BlockRemoved]
    assert {event.hash for event in news[:2]} == {event.hash for event in news[2:]}
    assert engine.scheduler.load().num_total_evictions == 0


def test_withdrawn_blocks_are_cleared_in_secure_mode() -> None:
    engine = Engine(secure=True)
    engine.add(make_sequence(1, TOKENS[:40], 20))
    engine.step()
    fail_next_step(engine)
    engine.add(make_sequence(2, 5, 1))
    assert sorted(engine.step().blocks_to_zero) == [0, 1, 2]


@BOTH_DEPTHS
def test_neighbours_of_a_failed_row_keep_their_streams(depth: int) -> None:
    engine = Engine(async_depth=depth)
    sequences = [make_sequence(id, 20, 10) for id in (1, 2, 3)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in sequences}
    engine.add(*sequences)
    engine.step()
    while engine.pending:
        engine.retire()
    fail_next_step(engine, slot=1)
    engine.run()
    assert (engine.tokens[1], engine.tokens[3]) == (wanted[1], wanted[3])
    assert engine.tokens[2] == wanted[2][:1]


def test_member_that_fails_leaves_the_prompt_of_its_group_in_the_cache() -> None:
    engine = Engine()
    engine.scheduler.add_group(make_group(1, TOKENS[:40], 2, 6))
    engine.step()
    fail_next_step(engine, slot=1)
    assert engine.ended[2].finish_reason is FinishReason.ERROR
    engine.run()
    assert engine.scheduler.load().num_blocks_cached == 2
    engine.assert_drained()


@BOTH_INDEXES
def test_failed_beam_takes_the_blocks_of_the_search_along(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:40], 20, beam=BeamParams(width=2)))
    engine.step()
    fail_next_step(engine, slot=1)
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    assert engine.scheduler.load().num_blocks_cached == 0
    engine.assert_drained()
