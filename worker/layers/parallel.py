"""Tensor parallelism as layers see it: sums and gathers over the ranks, nothing at all when there is one."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place. With size > 1 the default process group must be up."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather_last(self, x: Tensor) -> Tensor:
        """[..., n] of each rank → [..., size × n], in the order of ranks."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values everywhere, in place."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def share(self, total: int, what: str) -> int:
        """`total` over the ranks. Raises ValueError when it does not divide."""
        if total % self.size:
            raise ValueError(f"{total} {what} cannot be divided over {self.size} tensor-parallel ranks")
        return total // self.size
