"""What a step looks like to the runner: complete, picklable, and built row by row."""

import pickle

import pytest

from tests.core.builders import Engine, make_group, make_sequence
from worker.core.batch import DEFERRED_TOKEN, BatchOutput
from worker.core.scheduling.batch_builder import BatchBuilder
from worker.core.sequence import Sequence


def make_row(id: int, prompt: int, *, computed: int = 0, in_flight: int = 0, slot: int = 0) -> Sequence:
    seq = make_sequence(id, prompt)
    seq.num_computed_tokens = computed
    seq.num_in_flight_tokens = in_flight
    seq.slot = slot
    return seq


def test_row_that_reaches_the_end_of_the_known_tokens_samples() -> None:
    builder = BatchBuilder(3, 100)
    seq = make_row(1, 5, slot=7)
    assert builder.add_row(seq, 5)
    batch = builder.build([], [], [])
    assert (batch.step, batch.slots, batch.num_scheduled_tokens, batch.num_computed_tokens) == (3, [7], [5], [0])
    assert (list(batch.input_ids), batch.samples) == ([1000, 1001, 1002, 1003, 1004], [True])


def test_chunk_that_ends_earlier_does_not_sample() -> None:
    builder = BatchBuilder(0, 100)
    assert not builder.add_row(make_row(1, 5), 4)
    assert builder.build([], [], []).samples == [False]


def test_row_advances_the_sequence_and_uses_up_the_budget() -> None:
    builder = BatchBuilder(4, 100)
    seq = make_row(1, 9, computed=2)
    builder.add_row(seq, 3)
    assert (seq.num_computed_tokens, seq.last_step, builder.budget) == (5, 4, 97)


def test_tokens_in_flight_are_deferred() -> None:
    builder = BatchBuilder(0, 100)
    builder.add_row(make_row(1, 5, computed=5, in_flight=1), 1)
    builder.add_row(make_row(2, 5, computed=4, in_flight=1), 2)
    assert list(builder.build([], [], []).input_ids) == [DEFERRED_TOKEN, 2004, DEFERRED_TOKEN]


def test_rows_stand_one_after_another_in_the_input() -> None:
    builder = BatchBuilder(0, 100)
    builder.add_row(make_row(1, 3, slot=0), 3)
    builder.add_row(make_row(2, 2, slot=1), 2)
    batch = builder.build([], [], [])
    assert (list(batch.input_ids), batch.num_tokens) == ([1000, 1001, 1002, 2000, 2001], 5)


@pytest.mark.parametrize(
    ("prompt", "computed", "num_tokens", "expected"), [(5, 0, 5, True), (5, 4, 1, True), (5, 5, 1, False)]
)
def test_only_prompt_tokens_or_several_at_once_are_a_prefill(
    prompt: int, computed: int, num_tokens: int, expected: bool
) -> None:
    builder = BatchBuilder(0, 100)
    builder.add_row(make_row(1, prompt, computed=computed, in_flight=1 if computed == prompt else 0), num_tokens)
    assert builder.has_prefill is expected


def test_beam_rows_ask_for_as_many_candidates_as_the_widest_needs() -> None:
    builder = BatchBuilder(0, 100)
    for id, num_candidates in ((1, 4), (2, 12), (3, 8)):
        builder.add_row(make_row(id, 3, slot=id), 3)
        builder.mark_beam(num_candidates)
    batch = builder.build([], [], [])
    assert (batch.beam_rows, batch.num_candidates) == ([0, 1, 2], 12)


def test_binding_tells_all_about_the_sequence() -> None:
    builder = BatchBuilder(0, 100)
    seq = make_row(1, 3, slot=5)
    seq.token_ids.append(7)
    seq.block_table = [4, 9]
    seq.group_id = 2
    builder.bind(seq)
    (new,) = builder.build([], [], []).new_sequences
    assert (new.slot, list(new.token_ids), new.num_prompt_tokens) == (5, [1000, 1001, 1002, 7], 3)
    assert new.sampling == seq.sampling
    assert (new.block_ids, new.group_id) == ((4, 9), 2)


def test_what_was_bound_does_not_change_with_the_sequence() -> None:
    engine = Engine()
    engine.add(seq := make_sequence(1, 15, 9))
    first = engine.step()
    for _ in range(3):
        engine.step()
    (new,) = first.new_sequences
    assert (list(new.token_ids), new.block_ids) == (list(range(1000, 1015)), (0,))
    assert seq.block_table == [0, 1]


def test_batch_and_output_survive_pickling() -> None:
    engine = Engine(num_blocks=6, num_host_blocks=6, preemption_mode="swap", prefix="off")
    engine.scheduler.add_group(make_group(1, 20, 2, 40))
    engine.add(make_sequence(9, 20, 40))
    engine.run()
    for batch in engine.batches:
        assert pickle.loads(pickle.dumps(batch)) == batch
    output = BatchOutput(step=3, token_ids=[[1], []], errors={1: "why"}, candidates={0: [(1, -0.5)]}, run_seconds=0.5)
    assert pickle.loads(pickle.dumps(output)) == output


def test_batch_cannot_be_changed() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5, 1))
    batch = engine.step()
    with pytest.raises(AttributeError):
        batch.step = 9  # type: ignore[misc]


def test_rows_of_a_batch_are_aligned() -> None:
    engine = Engine(num_blocks=9, scheduling_policy="chunked", max_num_batched_tokens=32, async_depth=1)
    engine.add(*(make_sequence(id, 3 * id % 40 + 1, 20) for id in range(1, 12)))
    engine.run()
    for batch in engine.batches:
        lengths = map(len, (batch.slots, batch.num_scheduled_tokens, batch.num_computed_tokens, batch.samples))
        assert len(set(lengths)) == 1
        assert batch.num_tokens == sum(batch.num_scheduled_tokens) <= 32
        assert min(batch.num_scheduled_tokens) >= 1


def test_steps_are_numbered_without_a_gap() -> None:
    engine = Engine(async_depth=1)
    engine.add(make_sequence(1, 5, 6))
    engine.run()
    engine.add(make_sequence(2, 5, 2))
    engine.run()
    assert [batch.step for batch in engine.batches] == list(range(8))
