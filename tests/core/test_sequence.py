"""A sequence's derived counts, and every move between its states."""

import itertools

import pytest

from tests.core.builders import make_sequence
from worker.core.sequence import SequenceStatus
from worker.core.tokens import token_array

WAITING, RUNNING, SWAPPED, FINISHED, ABORTED = SequenceStatus
PATHS = {
    WAITING: [],
    RUNNING: [RUNNING],
    SWAPPED: [RUNNING, SWAPPED],
    FINISHED: [RUNNING, FINISHED],
    ABORTED: [ABORTED],
}
MOVES = {
    (WAITING, RUNNING),
    (WAITING, FINISHED),
    (WAITING, ABORTED),
    (RUNNING, WAITING),
    (RUNNING, SWAPPED),
    (RUNNING, FINISHED),
    (RUNNING, ABORTED),
    (SWAPPED, RUNNING),
    (SWAPPED, FINISHED),
    (SWAPPED, ABORTED),
}


@pytest.mark.parametrize(("start", "end"), list(itertools.product(SequenceStatus, repeat=2)))
def test_every_move_is_allowed_or_refused(start: SequenceStatus, end: SequenceStatus) -> None:
    seq = make_sequence(1, 5)
    for status in PATHS[start]:
        seq.move_to(status)
    if (start, end) in MOVES:
        seq.move_to(end)
        assert seq.status is end
    else:
        with pytest.raises(RuntimeError, match=f"sequence 1 cannot go from {start.name} to {end.name}"):
            seq.move_to(end)
        assert seq.status is start


@pytest.mark.parametrize("status", list(SequenceStatus))
def test_ended_means_finished_or_aborted(status: SequenceStatus) -> None:
    seq = make_sequence(1, 5)
    for step in PATHS[status]:
        seq.move_to(step)
    assert seq.is_ended is (status in (FINISHED, ABORTED))


def test_counts_of_a_new_sequence() -> None:
    seq = make_sequence(1, 5)
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_generated_tokens, seq.num_known_tokens) == (5, 5, 0, 5)


def test_resumed_tokens_are_output() -> None:
    seq = make_sequence(1, 5, output=[7, 8])
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_generated_tokens, seq.num_resumed_tokens) == (7, 5, 2, 2)


def test_tokens_in_flight_are_known_but_not_committed() -> None:
    seq = make_sequence(1, 5)
    seq.num_in_flight_tokens = 2
    assert (seq.num_tokens, seq.num_known_tokens, len(seq.token_ids)) == (5, 7, 5)


def test_tokens_are_its_own_and_take_four_bytes_each() -> None:
    prompt = token_array([1, 2, 3])
    seq = make_sequence(1, prompt)
    seq.token_ids.append(4)
    assert list(prompt) == [1, 2, 3]
    assert seq.token_ids.itemsize == 4


def test_ending_tokens_are_eos_and_stop_ids_together() -> None:
    assert make_sequence(1, 5, eos=(0, 1), stop_ids=(1, 2)).ending_token_ids == {0, 1, 2}


def test_no_attribute_can_be_added() -> None:
    with pytest.raises(AttributeError):
        make_sequence(1, 5).placeholder = 1  # type: ignore[attr-defined]
