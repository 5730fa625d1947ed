"""Prompt look-up: what is found, what it costs at most."""

import random

import pytest

from tests.core.builders import Engine, expected_output, make_sequence
from worker.core import ngram_drafter
from worker.core.ngram_drafter import NgramDrafter
from worker.core.ngram_index import NgramIndex
from worker.core.sequence import Sequence
from worker.core.tokens import token_array


def drafts(tokens: list[int], most: int = 4, shortest: int = 2, longest: int = 4) -> list[int]:
    drafter = NgramDrafter(shortest, longest)
    drafter.begin_step()
    return list(drafter.propose(make_sequence(1, tokens), most))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 9, 1, 2, 7, 9, 1, 2], [7, 9, 1, 2]),  # of equals the latest
        ([5, 1, 2, 3, 9, 1, 2, 7, 5, 1, 2], [3, 9, 1, 2]),  # the longer one before the latest
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # a match may reach to the end …
        ([7, 7, 7], [7, 7, 7, 7]),  # … and what it repeats is repeated
        ([8, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4, 5, 9, 1], []),  # one token is not enough
        ([1, 2, 3, 4], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens, found):
    assert drafts(tokens) == found


def test_no_more_than_asked_for():
    assert drafts([1, 2, 3, 4, 5, 9, 1, 2], most=2) == [3, 4]


def test_one_token_is_enough_where_it_is_said_to_be():
    assert drafts([1, 2, 3, 4, 5, 9, 1], shortest=1) == [2, 3, 4, 5]


def slow(tokens: list[int], shortest: int, longest: int) -> int:
    best, length = 0, shortest - 1
    for place in range(len(tokens) - 1, shortest - 1, -1):
        same = 0
        while same < min(longest, place) and tokens[place - 1 - same] == tokens[len(tokens) - 1 - same]:
            same += 1
        if same > length:
            best, length = place, same
    return best


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 5), (3, 3), (3, 8)])
def test_token_by_token_it_finds_what_a_search_from_scratch_does(shortest, longest):
    rnd = random.Random(shortest)
    index, tokens = NgramIndex(shortest), token_array([])
    for _ in range(300):
        # Few tokens and few places of each, so that no search ends before it has seen all of them.
        tokens.append(rnd.randrange(20) if rnd.random() < 0.7 else tokens[len(tokens) // 2] if tokens else 0)
        index.extend(tokens, 1)
        found = index.find(tokens, longest)
        wanted = slow(list(tokens), shortest, longest)
        assert found == wanted or tokens.count(tokens[-1]) > 32


def test_a_long_prompt_is_taken_in_over_several_steps(monkeypatch):
    monkeypatch.setattr(ngram_drafter, "MAX_INDEXED", 100)
    seq = make_sequence(1, [*range(240), 0, 1])
    other = make_sequence(2, [1, 2, 3, 1, 2])
    drafter, found = NgramDrafter(2, 4), []
    for _ in range(3):
        drafter.begin_step()
        found.append((list(drafter.propose(seq, 2)), list(drafter.propose(other, 2))))
    # The first has all of two steps; in the third there is room for both.
    assert found == [([], []), ([], []), ([2, 3], [3, 1])]


def test_a_search_looks_at_a_bounded_number_of_places(monkeypatch):
    """The longest match is the first of many, out of reach."""
    tokens = [9, 9, 1, 2, 5] + [1, 2, 6] * 40 + [9, 9, 1, 2]
    assert drafts(tokens, 1) == [6]


def test_through_the_scheduler_every_token_is_that_of_a_run_without():
    engine = Engine(drafter=NgramDrafter(1, 3), num_speculative_tokens=4, num_blocks=12, watermark=0.0)
    sequences: list[Sequence] = [make_sequence(id, [*range(11)] * 3, 40, seed=id) for id in range(1, 5)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in sequences}
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
    assert engine.scheduler.load().num_draft_tokens > 0
    assert engine.scheduler.load().num_preemptions > 0
