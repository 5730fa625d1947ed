"""Every sequence ends once, whatever races with its end; and news come once, in order."""

import pytest

from tests.core.builders import Engine, expected_hypotheses, expected_output, make_sequence
from worker.core.batch import BatchOutput
from worker.core.errors import InvalidSequenceError
from worker.core.params import BeamParams
from worker.core.stopping import FinishReason

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@BOTH_DEPTHS
def test_abort_after_three_of_a_thousand_tokens_frees_the_blocks_within_two_steps(depth: int) -> None:
    engine = Engine(async_depth=depth, max_model_len=1024, num_blocks=70)
    engine.add(make_sequence(1, 20, 1000))
    while len(engine.tokens.get(1, [])) < 3:
        engine.step()
    assert engine.scheduler.abort(1)
    for _ in range(2):
        engine.step()
    engine.assert_drained()
    assert len(engine.tokens[1]) == 3


def test_a_thousand_aborts_just_before_the_last_token_arrives() -> None:
    engine = Engine()
    for id in range(1000):
        engine.scheduler.add(make_sequence(id, 2, 1))
        batch = engine.scheduler.schedule()
        output = BatchOutput(step=batch.step, token_ids=[[1]])
        assert engine.scheduler.abort(id)
        engine.scheduler.postprocess(batch, output)
        assert not engine.scheduler.abort(id)
    outputs = engine.scheduler.take_outputs()
    assert [(output.sequence_id, output.finish_reason, output.token_ids) for output in outputs] == [
        (id, FinishReason.ABORTED, []) for id in range(1000)
    ]
    engine.assert_drained()


@BOTH_DEPTHS
def test_failed_row_of_an_aborted_sequence_ends_nobody_twice(depth: int) -> None:
    engine = Engine(async_depth=depth)
    engine.add(make_sequence(1, 5, 9))
    engine.runner.failing_slots = {0}
    engine.submit()
    engine.scheduler.abort(1)
    engine.retire()
    assert engine.ended[1].finish_reason is FinishReason.ABORTED


def test_deadline_and_abort_give_one_ending() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5, 9, deadline=engine.clock.now + 1))
    engine.scheduler.abort(1)
    engine.clock.now += 2
    assert engine.step() is None
    assert engine.ended[1].finish_reason is FinishReason.ABORTED


def test_earliest_deadline_wakes_first_and_is_forgotten_with_its_sequence() -> None:
    engine = Engine()
    now = engine.clock.now
    engine.add(make_sequence(1, 5, 9, deadline=now + 5), make_sequence(2, 5, 9, deadline=now + 3))
    assert engine.scheduler.next_wakeup() == now + 3
    engine.scheduler.abort(2)
    assert engine.scheduler.next_wakeup() == now + 5
    engine.scheduler.abort(1)
    assert engine.scheduler.next_wakeup() is None


def test_all_deadlines_that_passed_end_in_their_order() -> None:
    engine = Engine()
    now = engine.clock.now
    engine.add(*(make_sequence(id, 5, 9, deadline=now + id) for id in (3, 1, 2, 4)))
    engine.clock.now = now + 3
    engine.step()
    assert list(engine.ended) == [1, 2, 3]


def test_one_output_for_each_sequence_that_got_a_token_in_row_order() -> None:
    engine = Engine()
    for id in (7, 3, 5):
        engine.scheduler.add(make_sequence(id, 4, 5))
    engine.steps.fill()
    engine.steps.finish()
    assert [output.sequence_id for output in engine.scheduler.take_outputs()] == [7, 3, 5]
    assert engine.scheduler.take_outputs() == []


def test_chunk_without_a_token_gives_no_output() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=8)
    engine.scheduler.add(make_sequence(1, 20, 1))
    engine.steps.fill()
    engine.steps.finish()
    assert engine.scheduler.take_outputs() == []


def test_idle_scheduler_has_nothing_to_run() -> None:
    engine = Engine()
    assert engine.scheduler.schedule() is None
    assert not engine.scheduler.has_unfinished()


def test_drained_scheduler_has_empty_queues() -> None:
    engine = Engine(num_blocks=9, async_depth=1, scheduling_policy="chunked", max_num_batched_tokens=32)
    engine.add(*(make_sequence(id, 3 * id % 40 + 1, 20, deadline=1e9) for id in range(1, 12)))
    engine.run()
    state = engine.scheduler._state
    queues = (state.sequences, state.groups._parked, state.swapped, state.prefilling, state.decoding)
    assert not any(queues) and not state.beams and not state.beam_groups and not state.outputs
    assert not state.holdings.swap_out
    assert len(state.waiting) == len(state.deadlines) == 0
    engine.assert_drained()


@BOTH_DEPTHS
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
def test_without_a_limit_the_pool_ends_what_the_context_would_not(depth: int, policy: str) -> None:
    engine = Engine(num_blocks=3, async_depth=depth, scheduling_policy=policy, prefix="off")
    sequences = [make_sequence(id, 10, None) for id in (1, 2)]
    wanted = {seq.id: expected_output(seq, 3 * 16 + 1)[0] for seq in sequences}
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
    assert [engine.ended[id].finish_reason for id in (1, 2)] == [FinishReason.MODEL_LENGTH] * 2
    engine.assert_drained()


def test_without_a_limit_beams_end_at_their_share_of_the_pool() -> None:
    engine = Engine(num_blocks=7, prefix="off")
    seq = make_sequence(1, 10, None, beam=BeamParams(width=3))
    engine.add(seq)
    engine.run()
    ended = engine.ended[1]
    assert ended.hypotheses == expected_hypotheses(make_sequence(1, 10, None, beam=seq.beam), 2 * 16 + 1)
    assert ended.finish_reason is FinishReason.MODEL_LENGTH
    assert len(ended.token_ids) == 2 * 16 + 1 - 10


def test_a_limit_that_was_asked_for_and_cannot_fit_is_refused() -> None:
    engine = Engine(num_blocks=3)
    with pytest.raises(InvalidSequenceError) as refusal:
        engine.scheduler.add(make_sequence(1, 10, 40))
    assert (refusal.value.field, refusal.value.value, refusal.value.limit) == ("max_tokens", 40, 39)
    with pytest.raises(InvalidSequenceError) as refusal:
        engine.scheduler.add(make_sequence(1, 49, None))
    assert (refusal.value.field, refusal.value.value, refusal.value.limit) == ("token_ids", 49, 48)
