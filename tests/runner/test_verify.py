"""Which of a row's sampled tokens count, by what the drafts were."""

import torch

from worker.kernels.sampling import FAILED
from worker.sampling.sampler import NOTHING_ALLOWED
from worker.sampling.verify import Drafts, count_new


def counts(rows: list[tuple[list[int], list[int]]]) -> list[int]:
    """Of rows of (sampled tokens, drafts), the first one more than the second."""
    width = max(len(sampled) for sampled, _ in rows)
    in_place, has_draft, places, firsts, tokens = [], [], [], [], []
    for row, (sampled, drafted) in enumerate(rows):
        firsts.append(len(tokens))
        tokens += sampled
        in_place += [*drafted, sampled[-1]]
        has_draft += [1] * len(drafted) + [0]
        places += [row * width + number for number in range(len(sampled))]
    drafts = Drafts(torch.tensor(has_draft), torch.tensor(places), torch.tensor(firsts), width)
    return count_new(torch.tensor(tokens), torch.tensor(in_place), drafts).tolist()


def test_up_to_the_first_that_differs():
    rows = [([5, 6, 7], [5, 6]), ([5, 6, 7], [5, 9]), ([5, 6, 7], [9, 6]), ([4], []), ([1, 1], [1])]
    assert counts(rows) == [3, 2, 1, 1, 2]


def test_what_could_not_be_sampled_counts_as_the_first_only():
    """Behind right drafts it is left to the next step, which finds it again."""
    rows = [([FAILED, 6], [5]), ([5, FAILED, 7], [5, 6]), ([5, 6, NOTHING_ALLOWED], [5, 6]), ([NOTHING_ALLOWED], [])]
    assert counts(rows) == [1, 1, 2, 1]
