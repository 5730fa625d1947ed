"""Zeroing, copying and swapping of cache entries in torch, in the current stream."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.kernels.move import MoveKernel


class Move(MoveKernel):
    def zero(self, tensor: Tensor, entries: Tensor) -> None:
        tensor.index_fill_(0, entries, 0)

    def copy(self, tensor: Tensor, sources: Tensor, destinations: Tensor) -> None:
        tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def swap_out(self, tensor: Tensor, host: Tensor, entries: Tensor, host_entries: Sequence[int]) -> None:
        gathered = tensor.index_select(0, entries)
        for i, host_entry in enumerate(host_entries):
            host[host_entry].copy_(gathered[i], non_blocking=True)

    def swap_in(self, tensor: Tensor, host: Tensor, entries: Tensor, host_entries: Sequence[int]) -> None:
        staged = torch.empty((len(host_entries), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        for i, host_entry in enumerate(host_entries):
            staged[i].copy_(host[host_entry], non_blocking=True)
        tensor.index_copy_(0, entries, staged)
