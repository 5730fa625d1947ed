"""Counts and streams while steps are in flight, and what a preemption costs then."""

import pytest

from tests.core.builders import Engine, expected_output, make_sequence
from worker.core.batch import DEFERRED_TOKEN
from worker.core.sequence import Sequence, SequenceStatus
from worker.core.stopping import FinishReason

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])
BOTH_POLICIES = pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
BOTH_MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def outputs(*sequences: Sequence) -> dict[int, list[int]]:
    return {seq.id: expected_output(seq, 256)[0] for seq in sequences}


def test_two_steps_in_flight_hold_one_token_each() -> None:
    engine = Engine(async_depth=1)
    engine.add(seq := make_sequence(1, 5, 4))
    engine.submit()
    engine.submit()
    assert (seq.num_in_flight_tokens, seq.num_tokens, seq.num_known_tokens, seq.num_computed_tokens) == (2, 5, 7, 6)
    engine.retire()
    assert (seq.num_in_flight_tokens, seq.num_tokens, seq.num_known_tokens, seq.num_computed_tokens) == (1, 6, 7, 6)


def test_token_list_never_holds_a_placeholder() -> None:
    engine = Engine(async_depth=1)
    engine.add(seq := make_sequence(1, 5, 20))
    while engine.scheduler.has_unfinished() or engine.num_in_flight:
        engine.step()
        assert DEFERRED_TOKEN not in seq.token_ids


def test_known_token_is_sent_by_value_and_one_in_flight_is_deferred() -> None:
    engine = Engine(async_depth=1)
    engine.add(seq := make_sequence(1, 5, 5))
    engine.submit()
    engine.retire()
    assert engine.submit().input_ids == seq.token_ids[5:6]
    assert list(engine.submit().input_ids) == [DEFERRED_TOKEN]


def test_nothing_is_scheduled_behind_the_last_token_in_flight() -> None:
    engine = Engine(async_depth=1)
    engine.add(make_sequence(1, 5, 2))
    engine.submit()
    engine.submit()
    engine.retire()
    assert engine.submit() is None
    engine.retire()
    assert engine.ended[1].finish_reason is FinishReason.LENGTH


@BOTH_DEPTHS
@BOTH_POLICIES
@pytest.mark.parametrize("max_model_len", [12, 13, 15])
def test_end_of_the_model_is_a_known_limit_too(depth: int, policy: str, max_model_len: int) -> None:
    engine = Engine(async_depth=depth, scheduling_policy=policy, max_model_len=max_model_len)
    engine.add(make_sequence(1, 10, 100))
    engine.run()
    assert engine.runner.num_tokens == max_model_len - 1
    assert (len(engine.tokens[1]), engine.ended[1].finish_reason) == (max_model_len - 10, FinishReason.MODEL_LENGTH)


@BOTH_MODES
@BOTH_POLICIES
def test_sequence_preempted_twice_with_tokens_in_flight_keeps_its_stream(mode: str, policy: str) -> None:
    engine = Engine(
        async_depth=1,
        block_size=1,
        num_blocks=40,
        num_host_blocks=40,
        preemption_mode=mode,
        scheduling_policy=policy,
        prefix="off",
    )
    sequences = [make_sequence(id, 5, 30) for id in (1, 2, 3, 4)]
    wanted = outputs(*sequences)
    engine.add(*sequences)
    in_flight = []
    while engine.scheduler.has_unfinished() or engine.num_in_flight:
        before = [seq.num_preemptions for seq in sequences]
        batch = engine.submit()
        in_flight += [
            seq.num_in_flight_tokens for seq, num in zip(sequences, before, strict=True) if seq.num_preemptions > num
        ]
        if engine.num_in_flight > 1 or batch is None:
            engine.retire()
    assert engine.tokens == wanted
    assert max(seq.num_preemptions for seq in sequences) >= 2
    assert in_flight
    assert set(in_flight) == {1}


def test_preempted_sequence_is_not_readmitted_before_its_token_arrives() -> None:
    engine = Engine(async_depth=1, num_blocks=11, max_model_len=128)
    sequences = [make_sequence(id, 80, 3) for id in (1, 2)]
    engine.add(*sequences)
    engine.submit()
    engine.submit()
    assert (sequences[1].status, sequences[1].num_in_flight_tokens) == (SequenceStatus.WAITING, 1)
    engine.retire()
    assert sequences[1].num_in_flight_tokens == 0
    assert sequences[1].num_generated_tokens == 1


def test_token_that_arrives_after_a_preemption_may_end_the_sequence() -> None:
    engine = Engine(async_depth=1, num_blocks=11, max_model_len=128)
    first, second = make_sequence(1, 80, 30), make_sequence(2, 80, 30)
    (token, *_), _ = expected_output(second, 128)
    engine.add(first, make_sequence(2, 80, 30, stop_ids=(token,)))
    engine.submit()
    engine.submit()
    assert engine.scheduler.load().num_preemptions == 1
    engine.retire()
    assert (engine.tokens[2], engine.ended[2].finish_reason) == ([token], FinishReason.STOP_TOKEN)
    engine.run()
    engine.assert_drained()


@BOTH_MODES
@BOTH_DEPTHS
def test_every_token_is_computed_once_but_for_what_was_thrown_away(mode: str, depth: int) -> None:
    engine = Engine(num_blocks=6, num_host_blocks=6, preemption_mode=mode, async_depth=depth, prefix="off")
    engine.add(make_sequence(1, 40, 20), make_sequence(2, 40, 20))
    engine.run()
    lost = sum(
        sum(batch.num_scheduled_tokens[row] for row in range(len(batch.slots)) if batch.num_computed_tokens[row] == 0)
        for batch in engine.batches[1:]
    )
    assert engine.scheduler.load().num_preemptions == 1
    assert (lost > 0) is (mode == "recompute")
    assert engine.runner.num_tokens == 2 * (40 + 19) + (lost - 1 if lost else 0)


def test_sequence_that_needs_the_whole_pool_runs_after_the_others() -> None:
    engine = Engine(num_blocks=4, prefix="off")
    sequences = [make_sequence(1, 10, 20), make_sequence(2, 40, 25), make_sequence(3, 10, 20)]
    wanted = outputs(*sequences)
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
