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


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> LogprobTensors:
    """logits float32 [N, V] as the model gave them, token_ids int64 [N] (negative: no token, any entry will do)."""
    chosen_ids = token_ids.clamp(min=0)[:, None]
    chosen = logits.gather(1, chosen_ids)
    # Of equal logits all have the better rank.
    rank = (logits > chosen).sum(-1, keepdim=True) + 1
    best = logits.topk(most)
    ranks = torch.arange(1, most + 1, device=logits.device).expand(len(logits), -1)
    return LogprobTensors(
        token_ids=torch.cat((chosen_ids, best.indices), 1),
        logprobs=torch.cat((chosen, best.values), 1) - logits.logsumexp(-1, keepdim=True),
        ranks=torch.cat((rank, ranks), 1),
    )
