"""A row whose output is not finite: its sequence ends, and nobody finds what it computed, or hit."""

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from tests.core.fake_runner import NAN
from worker.core.batch import BatchOutput
from worker.core.cache.kv_events import BlockRemoved, BlockStored
from worker.core.params import BeamParams
from worker.core.stopping import FinishReason

BOTH_INDEXES = pytest.mark.parametrize("prefix", ["hash", "radix"])
BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])
TOKENS = list(range(500, 600))
CHUNKS = {"scheduling_policy": "chunked", "max_num_batched_tokens": 16}


def fail_next_step(engine: Engine, slot: int = 0) -> None:
    engine.runner.failing_slots = {slot}
    engine.submit()
    engine.runner.failing_slots = set()
    while engine.num_in_flight:
        engine.retire()


@BOTH_INDEXES
def test_earlier_chunks_of_a_failed_prompt_are_not_found(prefix: str) -> None:
    engine = Engine(prefix=prefix, scheduling_policy="chunked", max_num_batched_tokens=16)
    engine.add(make_sequence(1, TOKENS[:40], 5))
    engine.step()
    engine.step()
    fail_next_step(engine)
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    assert engine.scheduler.load().num_cached_blocks == 0
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
    while engine.num_in_flight:
        engine.retire()
    assert engine.scheduler._blocks.index.holds(1)
    fail_next_step(engine)
    assert engine.scheduler.load().num_cached_blocks == 0
    engine.assert_drained()


@BOTH_INDEXES
@BOTH_DEPTHS
def test_broken_chunk_ends_its_sequence_and_is_not_found(prefix: str, depth: int) -> None:
    engine = Engine(prefix=prefix, async_depth=depth, **CHUNKS)
    engine.add(make_sequence(1, TOKENS[:40], 5))
    fail_next_step(engine)
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    engine.add(again := make_sequence(2, TOKENS[:40], 1))
    engine.run()
    assert (again.num_cached_tokens, engine.tokens[2]) == (0, expected_output(make_sequence(2, TOKENS[:40], 1), 256)[0])


@BOTH_INDEXES
def test_broken_chunk_in_flight_at_an_abort_is_not_found(prefix: str) -> None:
    engine = Engine(prefix=prefix, async_depth=1, **CHUNKS)
    engine.add(make_sequence(1, TOKENS[:40], 5))
    engine.runner.failing_slots = {0}
    engine.submit()
    engine.runner.failing_slots = set()
    engine.scheduler.abort(1)
    engine.retire()
    engine.add(again := make_sequence(2, TOKENS[:40], 1))
    engine.run()
    assert (again.num_cached_tokens, engine.tokens[2]) == (0, expected_output(make_sequence(2, TOKENS[:40], 1), 256)[0])


@BOTH_INDEXES
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_with_the_failing_step_in_flight(prefix: str, mode: str) -> None:
    engine = Engine(prefix=prefix, async_depth=1, preemption_mode=mode, num_host_blocks=8)
    engine.add(make_sequence(1, TOKENS[:33], 1))
    engine.run()
    engine.add(failing := make_sequence(2, TOKENS[:60], 20))
    engine.runner.failing_slots = {0}
    engine.submit()
    engine.runner.failing_slots = set()
    engine.scheduler._state.preempt(failing)
    engine.retire()
    assert engine.ended[2].finish_reason is FinishReason.ERROR
    assert engine.scheduler.load().num_cached_blocks == 0
    engine.assert_drained()


def break_cache(engine: Engine, *blocks: int) -> None:
    """What was published as finite is so no more."""
    engine.checks_cache = False
    for block in blocks:
        engine.runner.kv[block] = [NAN] * engine.runner.block_size


@BOTH_INDEXES
@BOTH_DEPTHS
def test_hit_that_turns_out_broken_is_withdrawn(prefix: str, depth: int) -> None:
    engine = Engine(prefix=prefix, async_depth=depth)
    engine.add(make_sequence(1, TOKENS[:48], 1))
    engine.run()
    break_cache(engine, 1)
    for id in range(2, 8):
        engine.add(sequence := make_sequence(id, TOKENS[: 30 + 2 * id], 3))
        wanted = expected_output(sequence, 256)
        engine.run()
        if id == 2:
            assert engine.ended[id].finish_reason is FinishReason.ERROR
            engine.checks_cache = True
        else:
            assert (engine.tokens[id], engine.ended[id].finish_reason) == wanted


@BOTH_INDEXES
def test_broken_hit_of_a_sequence_that_is_aborted_meanwhile_is_withdrawn(prefix: str) -> None:
    engine = Engine(prefix=prefix, async_depth=1)
    engine.add(make_sequence(1, TOKENS[:48], 1))
    engine.run()
    break_cache(engine, 0)
    engine.add(make_sequence(2, TOKENS[:60], 3))
    engine.submit()
    engine.scheduler.abort(2)
    engine.retire()
    assert engine.scheduler.load().num_cached_blocks == 0


@BOTH_INDEXES
def test_another_salt_is_another_prefix(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:33], 1, salt=b"tenant"))
    engine.run()
    engine.add(make_sequence(2, TOKENS[:40], 20))
    fail_next_step(engine)
    assert engine.scheduler.load().num_cached_blocks == 2


@BOTH_INDEXES
def test_request_whose_rules_leave_no_token_withdraws_nothing(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:33], 1))
    engine.run()
    engine.scheduler.add(make_sequence(2, TOKENS[:33], 20))
    batch = engine.scheduler.schedule()
    output = BatchOutput(step=batch.step, token_ids=[[]], errors={0: "no token is left"}, unsatisfiable_rows=[0])
    engine.scheduler.postprocess(batch, output)
    (ended,) = engine.scheduler.take_outputs()
    assert (ended.finish_reason, ended.is_request_fault) == (FinishReason.ERROR, True)
    assert engine.scheduler.load().num_cached_blocks == 2


@BOTH_INDEXES
def test_step_of_before_a_preemption_publishes_nothing_of_the_blocks_after_it(prefix: str) -> None:
    """It comes back in the step behind, with fewer tokens than the step in flight computes in its former blocks."""
    engine = Engine(prefix=prefix, async_depth=1, scheduling_policy="chunked", max_num_batched_tokens=32)
    engine.add(seq := make_sequence(1, TOKENS[:60], 4))
    engine.submit()
    engine.scheduler._state.preempt(seq)
    engine.add(make_sequence(2, 8, 4, priority=-1))
    assert engine.submit().num_scheduled_tokens == [8, 24]
    engine.retire()
    engine.run()
    assert engine.tokens[1] == expected_output(make_sequence(1, TOKENS[:60], 4), 256)[0]


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
    assert engine.scheduler.load().num_evictions == 0


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
    while engine.num_in_flight:
        engine.retire()
    fail_next_step(engine, slot=1)
    engine.run()
    assert (engine.tokens[1], engine.tokens[3]) == (wanted[1], wanted[3])
    assert engine.tokens[2] == wanted[2][:1]


def test_member_that_fails_takes_the_prompt_of_its_group_along() -> None:
    engine = Engine()
    engine.scheduler.add_group(make_group(1, TOKENS[:40], 2, 6))
    engine.step()
    fail_next_step(engine, slot=1)
    assert engine.ended[2].finish_reason is FinishReason.ERROR
    engine.run()
    assert engine.scheduler.load().num_cached_blocks == 0
    engine.assert_drained()


@BOTH_INDEXES
def test_failed_beam_takes_the_blocks_of_the_search_along(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:40], 20, beam=BeamParams(width=2)))
    engine.step()
    fail_next_step(engine, slot=1)
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    assert engine.scheduler.load().num_cached_blocks == 0
    engine.assert_drained()
