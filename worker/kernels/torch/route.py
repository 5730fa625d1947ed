"""The choice of experts in torch."""

import torch
from torch import Tensor

from worker.kernels.experts import RouteKernel, RouteSpec

MIN_SUM = 1e-20
"""Added to the sum of the chosen scores, as the families' own code does: sigmoids may all be 0."""


class TorchRoute(RouteKernel):
    """Of equal scores `torch.topk` chooses."""

    def __init__(self, spec: RouteSpec) -> None:
        self._spec = spec

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        spec, logits = self._spec, logits.float()
        scores = logits.sigmoid() if spec.is_sigmoid else logits.softmax(-1)
        choice = scores if bias is None else scores + bias
        if spec.num_top_groups < spec.num_groups:
            choice = self._of_top_groups(choice)
        ids = choice.topk(spec.top_k, -1).indices
        weights = scores.gather(-1, ids)
        if spec.is_normalised:
            weights /= weights.sum(-1, keepdim=True) + MIN_SUM
        return weights.mul_(spec.scale), ids

    def _of_top_groups(self, choice: Tensor) -> Tensor:
        groups = choice.unflatten(-1, (self._spec.num_groups, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(self._spec.num_top_groups, -1).indices
        is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, best, False)
        return groups.masked_fill(is_out[..., None], -torch.inf).flatten(-2)
