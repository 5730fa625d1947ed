"""Log probabilities of the model's own distribution: of what was chosen, and of the most likely tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.core.batch import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """[N, 1 + most]: the chosen token first, then the most likely ones in order."""

    token_ids: Tensor
    """int64"""
    logprobs: Tensor
    """float32"""
    ranks: Tensor
    """int64, from 1."""

    def to_host(self) -> list[TokenLogprobs]:
        """Waits for nothing: the tensors must be on the host. All `most` entries of each."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]


def token_logprobs(logprobs: Tensor, token_ids: Tensor, most: int) -> LogprobTensors:
    """logprobs float32 [N, V] of the model, token_ids int64 [N] (negative: no token, any entry will do)."""
    chosen_ids = token_ids.clamp(min=0)[:, None]
    chosen = logprobs.gather(1, chosen_ids)
    # Of equal ones all have the better rank.
    rank = (logprobs > chosen).sum(-1, keepdim=True) + 1
    best = logprobs.topk(most)
    ranks = torch.arange(1, most + 1, device=logprobs.device).expand(len(logprobs), -1)
    return LogprobTensors(
        token_ids=torch.cat((chosen_ids, best.indices), 1),
        logprobs=torch.cat((chosen, best.values), 1),
        ranks=torch.cat((rank, ranks), 1),
    )
