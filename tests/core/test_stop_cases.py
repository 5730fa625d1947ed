"""Several tokens accepted in one step: where the run is cut, why, and that nothing behind the cut leaves a trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import Engine, make_sequence
from tests.core.helpers import answer
from worker.core.params import StopConditions
from worker.core.stop_sequences import StopSequences
from worker.core.stopping import FinishReason, find_stop

PROMPT = [1, 2, 3]
RUN = [11, 12, 13, 14, 15]


@pytest.mark.parametrize("position", range(1, 6))
@pytest.mark.parametrize("reason", ["EOS", "STOP_TOKEN", "STOP_SEQUENCE", "LENGTH", "MODEL_LENGTH"])
def test_every_rule_cuts_at_every_position(reason: str, position: int) -> None:
    token = RUN[position - 1]
    conditions = StopConditions(
        max_tokens=position if reason == "LENGTH" else 100,
        eos_token_ids=frozenset({token} if reason == "EOS" else ()),
        stop_token_ids=frozenset({token} if reason == "STOP_TOKEN" else ()),
        stop_token_sequences=((token,),) if reason == "STOP_SEQUENCE" else (),
    )
    limit = len(PROMPT) + position if reason == "MODEL_LENGTH" else 1000
    assert find_stop(PROMPT, RUN, 3, conditions, limit) == (position, FinishReason[reason])


@pytest.mark.parametrize(
    ("generated", "new", "kept"),
    [
        ([], [7, 8, 9, 4], 3),
        ([7], [8, 9, 4], 2),
        ([7, 8], [9, 4], 1),
        ([7, 7], [8, 9], 2),
        ([7, 8, 7], [8, 9, 4], 2),
    ],
)
def test_stop_sequence_may_begin_in_an_earlier_step(generated: list[int], new: list[int], kept: int) -> None:
    conditions = StopConditions(max_tokens=100, stop_token_sequences=((7, 8, 9),))
    assert find_stop([*PROMPT, *generated], new, 3, conditions, 1000) == (kept, FinishReason.STOP_SEQUENCE)


def test_stop_sequence_that_was_complete_earlier_does_not_match_again() -> None:
    conditions = StopConditions(max_tokens=100, min_tokens=3, stop_token_sequences=((7, 8),))
    assert find_stop([*PROMPT, 7, 8], [4, 5], 3, conditions, 1000) == (2, None)


def test_of_two_stop_sequences_the_one_that_ends_first_counts() -> None:
    conditions = StopConditions(max_tokens=100, stop_token_sequences=((11, 12, 13, 14), (12, 13)))
    assert find_stop(PROMPT, RUN, 3, conditions, 1000) == (3, FinishReason.STOP_SEQUENCE)


@pytest.mark.parametrize(
    ("sequences", "text", "expected"),
    [
        ((), [1], False),
        (((1,),), [], False),
        (((5, 1), (4, 1), (9, 1)), [7, 4, 1], True),
        (((5, 1), (4, 1), (9, 1)), [7, 6, 1], False),
        (((1,), (4, 1), (2, 9, 1)), [9, 1], True),
        (((300, 2, 1),), [300, 2, 1], True),
        (((300, 2, 1),), [44, 2, 1], False),
    ],
)
def test_last_token_first_is_how_sequences_are_compared(sequences, text: list[int], expected: bool) -> None:
    assert StopSequences(sequences).match_end(text) is expected


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=12).map(tuple),
    text=st.lists(st.integers(0, 2), max_size=12),
)
def test_any_sequences_match_as_one_by_one(sequences: tuple[tuple[int, ...], ...], text: list[int]) -> None:
    expected = any(tuple(text[-len(wanted) :]) == wanted for wanted in sequences)
    assert StopSequences(sequences).match_end(text) is expected
    assert not expected or text[-1] in StopSequences(sequences).last_token_ids


@pytest.mark.parametrize("num_of_prompt", [1, 2, 3])
def test_no_part_of_a_stop_sequence_may_lie_in_the_prompt(num_of_prompt: int) -> None:
    wanted = (*PROMPT[-num_of_prompt:], 11)
    assert find_stop(PROMPT, RUN, 3, StopConditions(max_tokens=100, stop_token_sequences=(wanted,)), 1000) == (5, None)


def test_stop_sequence_longer_than_the_output_does_not_match() -> None:
    conditions = StopConditions(max_tokens=100, stop_token_sequences=((*PROMPT, *RUN),))
    assert find_stop(PROMPT, RUN, 3, conditions, 1000) == (5, None)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, 5)])
def test_first_ending_at_or_after_min_tokens_counts(min_tokens: int, expected: int) -> None:
    conditions = StopConditions(max_tokens=100, min_tokens=min_tokens, eos_token_ids=frozenset({0}))
    assert find_stop(PROMPT, [0, 5, 0, 5, 0], 3, conditions, 1000) == (expected, FinishReason.EOS)


def test_tokens_of_an_earlier_worker_count_towards_min_and_max_tokens() -> None:
    conditions = StopConditions(max_tokens=4, min_tokens=3, eos_token_ids=frozenset({0}))
    assert find_stop([*PROMPT, 5, 5], [0], 3, conditions, 1000) == (1, FinishReason.EOS)
    assert find_stop([*PROMPT, 5, 5], [5, 5, 5], 3, conditions, 1000) == (2, FinishReason.LENGTH)


def test_ignored_eos_goes_on_and_a_stop_id_of_the_user_still_ends() -> None:
    """The model's own ids are left out of the conditions; the same id, named by the user, is a stop token."""
    conditions = StopConditions(max_tokens=100, stop_token_ids=frozenset({42}))
    assert find_stop(PROMPT, [0, 42, 5], 3, conditions, 1000) == (2, FinishReason.STOP_TOKEN)


def test_a_second_eos_id_ends_as_well() -> None:
    conditions = StopConditions(max_tokens=100, eos_token_ids=frozenset({0, 99}))
    assert find_stop(PROMPT, [5, 99, 0], 3, conditions, 1000) == (2, FinishReason.EOS)


@pytest.mark.parametrize(
    ("run", "kept", "reason"),
    [
        ([10, 11, 42, 20, 21, 22], 3, FinishReason.STOP_TOKEN),
        ([10, 11, 12, 13, 14, 42], 5, FinishReason.LENGTH),
        ([10, 11, 12, 13, 42], 5, FinishReason.STOP_TOKEN),
        ([10, 0, 42, 20], 2, FinishReason.EOS),
        ([7, 8, 0, 42], 2, FinishReason.STOP_SEQUENCE),
    ],
)
def test_accepted_run_through_the_scheduler(run: list[int], kept: int, reason: FinishReason) -> None:
    engine = Engine()
    engine.scheduler.add(seq := make_sequence(1, PROMPT, 5, eos=(0,), stop_ids=(42,), stop_sequences=((7, 8),)))
    (output,) = answer(engine, [run])
    assert (output.token_ids, output.finish_reason) == (run[:kept], reason)
    assert list(seq.token_ids) == [*PROMPT, *run[:kept]]
    assert not engine.scheduler.has_unfinished()


@pytest.mark.parametrize(("run", "num_kept"), [([5, 6, 0, 7, 8], 3), ([0, 5, 6], 1), ([5], 1)])
def test_tokens_behind_the_cut_are_not_counted(run: list[int], num_kept: int) -> None:
    engine = Engine()
    engine.scheduler.add(make_sequence(1, PROMPT, 10, eos=(0,)))
    answer(engine, [run])
    assert engine.scheduler.load().num_generated_tokens == num_kept


def test_tokens_behind_the_cut_are_not_cached() -> None:
    engine = Engine(block_size=1)
    engine.scheduler.add(make_sequence(1, PROMPT, 10, eos=(0,)))
    answer(engine, [[5, 0, 7, 8, 9]])
    assert engine.scheduler.load().num_cached_blocks == 3, "only the prompt was computed"
    engine.assert_drained()


def test_other_rows_of_the_step_are_not_touched_by_a_cut() -> None:
    engine = Engine()
    engine.scheduler.add(make_sequence(1, PROMPT, 10, eos=(0,)))
    engine.scheduler.add(make_sequence(2, PROMPT, 10, eos=(0,)))
    first, second = answer(engine, [[0, 5], [6]])
    assert (first.token_ids, second.token_ids, second.finish_reason) == ([0], [6], None)


def test_stop_sequence_may_begin_in_what_an_earlier_worker_generated() -> None:
    engine = Engine()
    engine.scheduler.add(make_sequence(1, PROMPT, 10, output=[7], stop_sequences=((7, 8),)))
    (output,) = answer(engine, [[8]])
    assert (output.token_ids, output.token_offset, output.finish_reason) == ([8], 1, FinishReason.STOP_SEQUENCE)


def test_offset_of_the_terminal_output_is_where_its_tokens_begin() -> None:
    engine = Engine()
    engine.scheduler.add(make_sequence(1, PROMPT, 10, eos=(0,)))
    outputs = [answer(engine, [[token]])[0] for token in (5, 6, 0)]
    assert [(output.token_offset, output.token_ids) for output in outputs] == [(0, [5]), (1, [6]), (2, [0])]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.EOS]
