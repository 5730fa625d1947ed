"""Stop strings: found across pieces, nothing of them shown, nothing held back without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answering.stop_strings import Released, StopMatcher


def run(pieces, stops, **options):
    """Text of each feed, then the stop or the flushed rest."""
    matcher = StopMatcher(stops, **options)
    shown = []
    for piece in pieces:
        released = matcher.feed(piece)
        shown.append(released.text)
        if released.stop:
            return shown, released.stop
    return [*shown, matcher.flush()], None


def test_a_stop_across_pieces_is_never_shown():
    assert run(["AB", "CD", "EF"], ["BCDE"]) == (["A", "", ""], "BCDE")


def test_include_stop_shows_it_whole():
    assert run(["AB", "CD", "EF"], ["BCDE"], include_stop=True) == (["A", "", "BCDE"], "BCDE")


def test_held_text_comes_out_when_it_was_no_stop():
    assert run(["AB", "C", "X"], ["BCDE"]) == (["A", "", "BCX", ""], None)


def test_held_text_comes_out_at_the_end():
    assert run(["AB", "C"], ["BCDE"]) == (["A", "", "BC"], None)


def test_only_a_proper_prefix_of_a_stop_is_held():
    assert run(["xyB", "Bq"], ["BCDE"]) == (["xy", "BBq", ""], None)


def test_overlapping_beginnings_are_found():
    assert run(["aaa", "ab"], ["aaab"]) == (["", "a"], "aaab")


@pytest.mark.parametrize("pieces", [["abcd"], ["a", "bcd"], ["ab", "cd"], ["a", "b", "c", "d"]])
def test_the_stop_complete_first_wins_however_the_text_is_cut(pieces):
    shown, stop = run(pieces, ["abcd", "bc"])
    assert ("".join(shown), stop) == ("a", "bc")


def test_of_two_complete_at_once_the_longest_wins():
    assert run(["xabc"], ["bc", "abc"]) == (["x"], "abc")


def test_text_behind_the_stop_in_the_same_piece_is_dropped():
    assert run(["one STOP two"], ["STOP"]) == (["one "], "STOP")


def test_unarmed_stops_are_ordinary_text_and_a_later_one_is_found():
    matcher = StopMatcher(["aa"])
    assert matcher.feed("aab", armed=False) == Released("aab")
    assert matcher.feed("a", armed=False) == Released("")
    assert matcher.feed("a") == Released("", "aa")


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_cut_gives_what_a_search_of_the_whole_gives(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, stop = run(pieces, stops)
    ends = [(end, -len(s)) for s in stops for end in range(len(text) + 1) if text[:end].endswith(s)]
    if not ends:
        assert ("".join(shown), stop) == (text, None)
        return
    end, negative_length = min(ends)
    start = end + negative_length
    assert ("".join(shown), stop) == (text[:start], text[start:end])
