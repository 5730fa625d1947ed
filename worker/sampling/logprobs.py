"""Log probabilities of the model's own distribution: of what was chosen, and of the most likely tokens."""

from dataclasses import dataclass

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
