"""Log probabilities of the model's own distribution: of what was chosen, and of the most likely tokens."""

from typing import NamedTuple

from torch import Tensor

from worker.core.batch import TokenLogprobs


class LogprobTensors(NamedTuple):
    """[N, 1 + most]: the chosen token first, then the most likely ones in order."""

    token_ids: Tensor
    """int64"""
    logprobs: Tensor
    """float32"""
    ranks: Tensor
    """int64, from 1."""

    def to_host(self) -> list[TokenLogprobs]:
        """Waits for nothing: the tensors must be on the host. All `most` entries of each."""
        rows = zip(*(tensor.tolist() for tensor in self), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]
