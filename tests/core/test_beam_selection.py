"""The choice of beams, step by step, by numbers worked out on paper."""

import pytest

from worker.core.beam import BeamSearch, NextBeam
from worker.core.outputs import Hypothesis
from worker.core.params import BeamParams, StopConditions
from worker.core.stopping import FinishReason

PROMPT = [8, 9]
EOS = 0


def make_search(
    width: int = 2,
    *,
    eos: tuple[int, ...] = (EOS,),
    stop_ids: tuple[int, ...] = (),
    stop_sequences: tuple[tuple[int, ...], ...] = (),
    max_tokens: int = 10,
    min_tokens: int = 0,
    max_model_len: int = 100,
    **params: object,
) -> BeamSearch:
    stop = StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        eos_token_ids=frozenset(eos),
        stop_token_ids=frozenset(stop_ids),
        stop_token_sequences=stop_sequences,
    )
    return BeamSearch(BeamParams(width=width, **params), stop, len(PROMPT), max_model_len)


def found(search: BeamSearch) -> list[tuple[list[int], float]]:
    return [(hypothesis.token_ids, hypothesis.score) for hypothesis in search.hypotheses]


def test_first_step_opens_the_best_continuations() -> None:
    search = make_search()
    assert search.advance([PROMPT], [[(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)]]) == [
        NextBeam(0, 1, -1.0),
        NextBeam(0, 2, -2.0),
    ]
    assert search.scores == [-1.0, -2.0]


def test_log_probabilities_add_up_and_one_beam_may_take_all_places() -> None:
    search = make_search()
    search.scores = [-1.0, -2.0]
    beams = [[*PROMPT, 1], [*PROMPT, 2]]
    candidates = [
        [(5, -3.0), (6, -3.5), (7, -9.0), (1, -9.0)],
        [(7, -0.5), (5, -1.0), (6, -9.0), (1, -9.0)],
    ]
    assert search.advance(beams, candidates) == [NextBeam(1, 7, -2.5), NextBeam(1, 5, -3.0)]


def test_equal_scores_keep_the_earlier_beam_first() -> None:
    search = make_search()
    search.scores = [-1.0, -1.0]
    beams = [[*PROMPT, 1], [*PROMPT, 2]]
    candidates = [[(5, -1.0), (6, -2.0)], [(7, -1.0), (5, -2.0)]]
    assert search.advance(beams, candidates) == [NextBeam(0, 5, -2.0), NextBeam(1, 7, -2.0)]


def test_ending_among_the_best_width_is_a_hypothesis_and_the_next_ones_move_up() -> None:
    search = make_search()
    nexts = search.advance([PROMPT], [[(EOS, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]])
    assert nexts == [NextBeam(0, 1, -2.0), NextBeam(0, 2, -3.0)]
    assert search.hypotheses == [Hypothesis([EOS], -1.0, FinishReason.EOS)]


def test_ending_below_the_best_width_is_dropped() -> None:
    search = make_search()
    nexts = search.advance([PROMPT], [[(1, -1.0), (2, -2.0), (EOS, -3.0), (3, -4.0)]])
    assert (nexts, search.hypotheses) == ([NextBeam(0, 1, -1.0), NextBeam(0, 2, -2.0)], [])


@pytest.mark.parametrize(
    ("length_penalty", "score"), [(0.0, -6.0), (1.0, -2.0), (2.0, -6.0 / 9), (-1.0, -18.0), (0.5, -6.0 / 3**0.5)]
)
def test_score_is_divided_by_the_generated_length_to_the_power_of_the_penalty(
    length_penalty: float, score: float
) -> None:
    search = make_search(1, length_penalty=length_penalty)
    search.scores = [-5.0]
    search.advance([[*PROMPT, 4, 5]], [[(EOS, -1.0), (1, -1.5)]])
    assert found(search) == [([4, 5, EOS], pytest.approx(score))]


def test_only_the_best_hypotheses_are_kept_best_first() -> None:
    search = make_search()
    search.hypotheses = [Hypothesis([3], -1.0, FinishReason.EOS), Hypothesis([4], -4.0, FinishReason.EOS)]
    search.scores = [-4.0, -9.0]
    search.advance([[*PROMPT, 1], [*PROMPT, 2]], [[(EOS, 0.0), (5, -1.0)], [(5, -1.0), (6, -1.0)]])
    assert found(search) == [([3], -1.0), ([1, EOS], -2.0)]


def test_equal_hypotheses_keep_the_earlier_one() -> None:
    search = make_search(1)
    search.hypotheses = [Hypothesis([3], -2.0, FinishReason.EOS)]
    search.scores = [-3.0]
    search.advance([[*PROMPT, 1]], [[(EOS, -1.0), (5, -1.0)]])
    assert found(search) == [([3], -2.0)]


def test_search_goes_on_while_there_are_fewer_hypotheses_than_beams() -> None:
    search = make_search(early_stopping=True)
    assert search.advance([PROMPT], [[(EOS, -0.1), (1, -9.0), (2, -9.5), (3, -9.9)]]) != []


def test_early_stopping_ends_with_as_many_hypotheses_as_beams() -> None:
    search = make_search(1, early_stopping=True)
    assert search.advance([PROMPT], [[(EOS, -5.0), (1, -5.1)]]) == []
    assert found(search) == [([EOS], -5.0)]


def test_without_early_stopping_a_beam_that_could_still_win_goes_on() -> None:
    search = make_search(1, length_penalty=0.0)
    search.scores = [-1.0]
    search.hypotheses = [Hypothesis([3], -5.0, FinishReason.EOS)]
    assert search.advance([[*PROMPT, 1]], [[(4, -1.0), (5, -2.0)]]) == [NextBeam(0, 4, -2.0)]


def test_without_early_stopping_a_beam_that_cannot_win_ends_the_search() -> None:
    search = make_search(1, length_penalty=0.0)
    search.scores = [-5.0]
    search.hypotheses = [Hypothesis([3], -5.0, FinishReason.EOS)]
    assert search.advance([[*PROMPT, 1]], [[(4, -1.0), (5, -2.0)]]) == []
    assert found(search) == [([3], -5.0)]


def test_limit_ends_all_beams_and_the_best_width_are_the_result() -> None:
    search = make_search(max_tokens=2)
    search.scores = [-1.0, -2.0]
    beams = [[*PROMPT, 1], [*PROMPT, 2]]
    candidates = [[(5, -1.0), (6, -8.0)], [(7, -2.0), (5, -9.0)]]
    assert search.advance(beams, candidates) == []
    assert search.hypotheses == [
        Hypothesis([1, 5], -1.0, FinishReason.LENGTH),
        Hypothesis([2, 7], -2.0, FinishReason.LENGTH),
    ]


def test_end_of_the_model_ends_all_beams() -> None:
    search = make_search(1, max_model_len=3)
    assert search.advance([PROMPT], [[(5, -1.0), (6, -2.0)]]) == []
    assert search.hypotheses == [Hypothesis([5], -1.0, FinishReason.MODEL_LENGTH)]


def test_stop_token_ends_a_beam() -> None:
    search = make_search(1, eos=(), stop_ids=(5,), early_stopping=True)
    assert search.advance([PROMPT], [[(5, -1.0), (6, -2.0)]]) == []
    assert search.hypotheses == [Hypothesis([5], -1.0, FinishReason.STOP_TOKEN)]


def test_stop_sequence_ends_only_the_beam_that_completes_it() -> None:
    search = make_search(stop_sequences=((1, 7),))
    search.scores = [-1.0, -2.0]
    beams = [[*PROMPT, 1], [*PROMPT, 2]]
    nexts = search.advance(beams, [[(7, -1.0), (5, -5.0)], [(7, -0.5), (5, -3.0)]])
    assert nexts == [NextBeam(1, 7, -2.5), NextBeam(1, 5, -5.0)]
    assert search.hypotheses == [Hypothesis([1, 7], -1.0, FinishReason.STOP_SEQUENCE)]


def test_no_ending_before_min_tokens() -> None:
    """The third generated token may be one."""
    search = make_search(1, min_tokens=2)
    assert search.advance([PROMPT], [[(EOS, -1.0), (6, -2.0)]]) == [NextBeam(0, 6, -2.0)]
    assert search.advance([[*PROMPT, 6]], [[(EOS, -1.0), (7, -2.0)]]) == [NextBeam(0, 7, -4.0)]
    assert search.hypotheses == []
    search.advance([[*PROMPT, 6, 7]], [[(EOS, -1.0), (8, -2.0)]])
    assert [hypothesis.token_ids for hypothesis in search.hypotheses] == [[6, 7, EOS]]


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ({"eos": ()}, 6),
        ({"eos": (0,)}, 6),
        ({"eos": (0, 1)}, 9),
        ({"eos": (0, 1), "stop_ids": (1, 2)}, 12),
        ({"eos": (), "stop_sequences": ((1, 2), (3,))}, 9),
    ],
)
def test_so_many_candidates_that_all_places_are_filled_whatever_ends(endings: dict, expected: int) -> None:
    assert make_search(3, **endings).num_candidates == expected


def test_candidates_beyond_those_looked_at_are_ignored() -> None:
    search = make_search(1, eos=(0, 1), min_tokens=0)
    search.advance([PROMPT], [[(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]])
    assert search.scores == [-3.0]
    assert found(search) == [([0], -1.0)]
