"""Expert parallelism: each rank holds some of the experts, and sees the tokens of all data-parallel ranks.

A layer's tokens are gathered from the data-parallel ranks, each with the experts that were chosen for it; every rank
computes what its own experts add to each of them; sums go back to the tokens' own ranks. Two collectives a layer, of a
size that all ranks know beforehand, so that they can be in a graph. To send a token only to the ranks that hold its
experts (all-to-all) would pass less between many ranks, and need counts of each.
"""

import torch
from torch import Tensor

from worker.parallel.group import Group

NO_EXPERT = -1
"""In place of an expert: adds nothing to its token on any rank."""


class TokenExchange:
    """Between the ranks of `dp`. All must call alike, with the same `num_tokens`."""

    def __init__(self, dp: Group) -> None:
        self._dp = dp

    def gather(self, x: Tensor, weights: Tensor, ids: Tensor, num_tokens: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], and what was routed: weights float32 [T, k], ids [T, k] → the same of all ranks, each with
        `num_tokens` rows (at least T; None: T), of which those without a token name no expert."""
        if self._dp.size == 1:
            return x, weights, ids
        parts = [part.contiguous() for part in (x, weights, ids)]
        widths = [part.shape[1] * part.element_size() for part in parts]
        # One message a token: a collective costs per call, not per byte.
        rows = torch.cat([part.view(torch.uint8) for part in parts], 1)
        missing = (num_tokens or len(x)) - len(x)
        if missing:
            nobody = ids.new_full((missing, ids.shape[1]), NO_EXPERT).view(torch.uint8)
            padding = rows.new_zeros(missing, rows.shape[1])
            padding[:, -widths[-1] :] = nobody
            rows = torch.cat([rows, padding])
        gathered = self._dp.all_gather(rows).split(widths, 1)
        all_x, all_weights, all_ids = (
            found.contiguous().view(part.dtype) for found, part in zip(gathered, parts, strict=True)
        )
        return all_x, all_weights, all_ids

    def scatter(self, parts: Tensor, num_own: int) -> Tensor:
        """What this rank adds to each of the gathered tokens → the sum over ranks of its own, [num_own, H]."""
        if self._dp.size == 1:
            return parts
        return self._dp.reduce_scatter(parts)[:num_own]
