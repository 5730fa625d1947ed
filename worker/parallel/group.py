"""Ranks that work on one thing together, as layers see them: sums and gathers, nothing at all when there is one."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.gathering import Gathering
from worker.parallel.symmetric import Inboxes, Parts, SymmetricSums

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's place among `size` ranks. With size > 1 its operations need the `handle` of a process group."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    symmetric: SymmetricSums | None = None
    """For what is small enough."""

    def place(self, *shape: int, dtype: torch.dtype) -> Tensor | None:
        """Where a part of a sum may be written, for `all_reduce` to take it from there; None: anywhere. Valid until the
        second next part or sum."""
        return None if self.symmetric is None else self.symmetric.place(shape, dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks: in x, or where it is valid until the second next part or sum. May overwrite x."""
        if self.size == 1:
            return x
        total = None if self.symmetric is None else self.symmetric.all_reduce(x)
        if total is None:
            dist.all_reduce(x, group=self.handle)
            return x
        return total

    def parts(self, x: Tensor) -> Parts | None:
        """In place of `all_reduce`, for a kernel that reads all parts itself; None where that cannot be, or is slower.
        The kernel may not write to x, which the other ranks read until the next sum."""
        return None if self.symmetric is None else self.symmetric.parts(x)

    @property
    def inboxes(self) -> Inboxes | None:
        """Where ranks send each other parts of sums, for kernels that add up as they go; None: `all_reduce` alone."""
        return None if self.symmetric is None else self.symmetric.inboxes

    def gather_place(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Where this rank's [R, n] may be written for `gather_last`, which must follow then; None: anywhere."""
        return None if self._gathering is None else self._gathering.place(num_rows, width, dtype)

    def gather_last(self, x: Tensor) -> Tensor | None:
        """[R, n] of each rank → [R, size × n] in the order of ranks, on rank 0, valid until the next place is asked
        for; None on the others."""
        if self.size == 1:
            return x
        if self._gathering is not None and self._gathering.is_open:
            return self._gathering.take(x)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x.contiguous(), parts, group=self.handle, group_dst=0)
        return None if parts is None else torch.cat(parts, -1)

    @property
    def _gathering(self) -> Gathering | None:
        return None if self.symmetric is None else self.symmetric.gathering

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of each rank → [size × n, ...] in the order of ranks, on all of them; n is the same on all."""
        if self.size == 1:
            return x
        found = x.new_empty(self.size * len(x), *x.shape[1:])
        all_gather_single(found, x.contiguous(), group=self.handle)
        return found

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size × n, ...] of each rank, n rows for each → the sum over ranks of this rank's, [n, ...]. May overwrite
        x."""
        if self.size == 1:
            return x
        total = x.new_empty(len(x) // self.size, *x.shape[1:])
        reduce_scatter_single(total, x.contiguous(), group=self.handle)
        return total

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values everywhere, in place."""
        if self.size > 1:
            dist.broadcast(x, group=self.handle, group_src=0)
        return x

    def minimum(self, value: int, device: torch.device) -> int:
        """The least of all ranks' values, on each. Waits for all of them."""
        if self.size == 1:
            return value
        least = torch.tensor(value, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.handle)
        return int(least)

    def share(self, total: int, what: str) -> int:
        """`total` over the ranks. Raises ValueError when it does not divide."""
        if total % self.size:
            raise ValueError(f"{total} {what} cannot be divided over {self.size} ranks")
        return total // self.size


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Groups:
    """Those of one rank. World rank = data-parallel rank × tensor-parallel ranks + tensor-parallel rank."""

    tp: Group = ALONE
    """Share each layer of one worker's model."""
    dp: Group = ALONE
    """Of the same place in the workers that step together: what passes tokens between them."""
    ep: Group = ALONE
    """Share the experts: all ranks of all workers that step together."""
    control: Group = ALONE
    """All ranks of all workers that step together, whatever the device on the host (gloo): they agree on their steps.
    """
