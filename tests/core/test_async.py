"""Steps in flight: exact token counts, late tokens, blocks that stay put."""

import itertools

import pytest

from tests.core.builders import Engine, expected_output, make_sequence
from worker.core.batch import DEFERRED_TOKEN, BatchOutput
from worker.core.stopping import FinishReason

BOTH_POLICIES = pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@BOTH_POLICIES
@BOTH_DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_known_limits_are_not_overrun(policy: str, depth: int, max_tokens: int) -> None:
    engine = Engine(async_depth=depth, scheduling_policy=policy)
    engine.add(make_sequence(1, 10, max_tokens), make_sequence(2, 20, max_tokens))
    engine.run()
    assert engine.runner.num_tokens == 10 + 20 + 2 * (max_tokens - 1)
    assert [len(engine.tokens[id]) for id in (1, 2)] == [max_tokens] * 2


def test_next_step_is_scheduled_before_the_last_one_is_known() -> None:
    engine = Engine(async_depth=1)
    engine.add(sequence := make_sequence(1, 5, 5))
    engine.submit()
    assert sequence.num_in_flight_tokens == 1
    assert list(engine.submit().input_ids) == [DEFERRED_TOKEN]
    assert (list(sequence.token_ids), sequence.num_computed_tokens) == (list(range(1000, 1005)), 6)
    with pytest.raises(RuntimeError, match="2 steps are in flight already"):
        engine.scheduler.schedule()


def test_steps_come_back_in_order() -> None:
    engine = Engine(async_depth=1)
    engine.add(make_sequence(1, 5, 5))
    engine.submit()
    engine.submit()
    with pytest.raises(RuntimeError, match=r"step 1 .* is not the oldest in flight"):
        engine.scheduler.postprocess(engine.batches[1], BatchOutput(step=1, token_ids=[[]]))


def test_late_token_of_a_sequence_that_stopped_is_dropped() -> None:
    engine = Engine(async_depth=1)
    sequence = make_sequence(1, 5, 50)
    tokens, _ = expected_output(sequence, 256)
    engine.add(make_sequence(1, 5, 50, stop_ids=(tokens[2],)))
    expected = tokens[: tokens.index(tokens[2]) + 1]
    engine.run()
    assert engine.tokens[1] == expected
    assert engine.ended[1].finish_reason is FinishReason.STOP_TOKEN
    assert engine.runner.num_tokens == 5 + len(expected)  # the step that was in flight


def test_blocks_are_not_handed_out_before_the_last_step_that_uses_them_is_retired() -> None:
    engine = Engine(async_depth=1, num_blocks=4, prefix="off")
    engine.add(make_sequence(1, 40, 20))
    engine.submit()
    engine.submit()
    engine.scheduler.abort(1)
    engine.check()
    assert engine.scheduler.load().num_free_blocks == 1
    engine.add(make_sequence(2, 20, 1))
    engine.retire()
    assert engine.scheduler.load().num_free_blocks == 1, "step 1 still reads them"
    assert engine.submit() is None
    engine.retire()
    assert engine.scheduler.load().num_free_blocks == 4
    assert engine.submit().slots == [0]


def test_slots_of_the_next_two_are_distinct_after_an_abort_in_flight() -> None:
    engine = Engine(async_depth=1)
    engine.add(make_sequence(1, 5, 20))
    engine.submit()
    engine.scheduler.abort(1)
    engine.add(make_sequence(2, 5, 20), make_sequence(3, 5, 20))
    batch = engine.submit()
    assert len(set(batch.slots)) == 2
    engine.retire()
    engine.run()
    engine.assert_drained()


@BOTH_POLICIES
def test_aborts_in_flight_leave_each_sequence_what_it_had(policy: str) -> None:
    engine = Engine(async_depth=1, scheduling_policy=policy, max_num_seqs=16)
    sequences = [make_sequence(id, 5, 100) for id in range(10)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in sequences}
    engine.add(*sequences)
    engine.submit()
    counts = {}
    for sequence_id in (0, 8, 3, 1, 9, 2, 7, 4, 6, 5):
        engine.submit()
        engine.scheduler.abort(sequence_id)
        counts[sequence_id] = len(counts)
        engine.retire()
    engine.run()
    assert {id: len(tokens) for id, tokens in engine.tokens.items()} == counts
    assert all(tokens == wanted[id][: len(tokens)] for id, tokens in engine.tokens.items())


def test_preempted_sequence_keeps_the_token_that_was_in_flight() -> None:
    engine = Engine(async_depth=1, num_blocks=11, max_model_len=128)
    sequences = [make_sequence(id, 80, 3) for id in (1, 2)]
    wanted = {seq.id: expected_output(seq, 128)[0] for seq in sequences}
    engine.add(*sequences)
    engine.submit()
    engine.submit()  # both need a sixth block and there is one
    assert [seq.num_preemptions for seq in sequences] == [0, 1]
    assert sequences[1].num_in_flight_tokens == 1
    engine.retire()
    assert engine.tokens[2] == wanted[2][:1]
    engine.run()
    assert engine.tokens == wanted


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@BOTH_POLICIES
def test_streams_are_those_of_the_synchronous_run_under_pressure(mode: str, policy: str) -> None:
    streams = []
    for depth in (0, 1):
        engine = Engine(
            async_depth=depth,
            scheduling_policy=policy,
            preemption_mode=mode,
            num_blocks=9,
            num_host_blocks=6,
            max_model_len=128,
        )
        engine.add(*(make_sequence(id, 30, 60) for id in range(1, 7)))
        engine.run()
        assert engine.scheduler.load().num_preemptions > 2
        streams.append(engine.tokens)
        engine.assert_drained()
    assert streams[0] == streams[1]


@BOTH_DEPTHS
def test_a_thousand_finishes_race_with_aborts(depth: int) -> None:
    engine = Engine(async_depth=depth)
    ids = itertools.count(1)
    for _ in range(1000):
        sequence_id = next(ids)
        engine.scheduler.add(make_sequence(sequence_id, 2, 2))
        engine.submit()
        engine.submit() if depth else None
        engine.steps.finish()
        if not depth:
            engine.submit()
        engine.steps.finish()
        assert not engine.scheduler.abort(sequence_id)
        engine.check()
    assert len(engine.ended) == 1000
    engine.assert_drained()
