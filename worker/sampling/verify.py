"""Which drafts were right: the equality of what is sampled with and without them.

At each position of a row with drafts the model's own token is sampled, by the row's own rules and with that position's
own noise. A draft that equals it has shown the next position what it would have seen without drafts. So tokens are the
same as without, whatever the rules of sampling are.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of a step with S sampled tokens in N rows, those of a row one after another. Tensors are on the device, int64."""

    has_draft: Tensor
    """[S]: 1 where the place of the sampled token has a draft, which it must equal for the row's next one to count; 0
    for a row's last."""
    places: Tensor
    """[S]: row × `width` + number within the row."""
    firsts: Tensor
    """[N]: each row's first among the S."""
    width: int
    """Most sampled tokens of a row."""


def count_new(token_ids: Tensor, in_place: Tensor, drafts: Drafts) -> Tensor:
    """How many of each row's tokens, int64 [S], count: int64 [N], at least 1. `in_place`, int [S]: the drafts, anything
    where there is none.

    One that could not be sampled (negative) counts as a row's first only: behind others it is left to the next step,
    where it will be the first.
    """
    num_rows = len(drafts.firsts)
    is_right = token_ids.new_zeros(num_rows * drafts.width)
    is_right.index_copy_(0, drafts.places, (token_ids == in_place).long() * drafts.has_draft)
    num_new = is_right.view(num_rows, drafts.width).cumprod(1).sum(1).add_(1)
    last = token_ids.index_select(0, drafts.firsts + num_new - 1)
    return num_new - ((last < 0) & (num_new > 1)).long()
