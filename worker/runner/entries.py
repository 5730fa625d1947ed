"""Moves of cache entries between steps' uses of them: clear, swap out, copy, swap in; copies of states, and what those
of new sequences begin with. Blind to what is in them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.attention.interface import CacheBuilder
from worker.core.batch import ScheduledBatch
from worker.core.cache.pools import PoolKind
from worker.kernels.move import MOVE_ENTRIES
from worker.kernels.select import Kernels
from worker.kernels.transfer import indices


class EntryMover:
    """Over the caches that the builders allocated last, and the host memory for swapped blocks, which it owns."""

    def __init__(self, builders: Sequence[CacheBuilder], kernels: Kernels, num_host_blocks: int) -> None:
        self._device = kernels.device
        self._kernel = kernels.choose(MOVE_ENTRIES, None, torch.int64)
        entries = [entry for builder in builders for entry in builder.entry_tensors()]
        self._pages = [(e.tensor, self._host(e.tensor, num_host_blocks)) for e in entries if e.kind is PoolKind.PAGE]
        self._states = [(e.tensor, e.entries_per_request) for e in entries if e.kind is PoolKind.STATE]

    def _host(self, tensor: Tensor, num_blocks: int) -> Tensor:
        """A host block is one piece of memory, pinned when the device is a GPU."""
        return torch.empty(num_blocks, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=self._device.type == "cuda")

    def move(self, batch: ScheduledBatch) -> None:
        """In this order, before anything of the step reads or writes the cache."""
        for tensor, host in self._pages:
            if batch.blocks_to_zero:
                self._kernel.zero(tensor, indices(batch.blocks_to_zero, self._device))
            if batch.blocks_to_swap_out:
                blocks, host_blocks = zip(*batch.blocks_to_swap_out, strict=True)
                self._kernel.swap_out(tensor, host, indices(blocks, self._device), host_blocks)
            if batch.blocks_to_copy:
                sources, destinations = zip(*batch.blocks_to_copy, strict=True)
                self._kernel.copy(tensor, indices(sources, self._device), indices(destinations, self._device))
            if batch.blocks_to_swap_in:
                host_blocks, blocks = zip(*batch.blocks_to_swap_in, strict=True)
                self._kernel.swap_in(tensor, host, indices(blocks, self._device), host_blocks)
        news = [(new.restored_group, new.group_id) for new in batch.new_sequences if new.group_id >= 0]
        for tensor, num in self._states:
            self._copy_groups(tensor, num, batch.states_to_copy)
            self._copy_groups(tensor, num, [(source, group) for source, group in news if 0 <= source != group])
            if fresh := [group for source, group in news if source < 0]:
                self._kernel.zero(tensor, self._entries(fresh, num))

    def _copy_groups(self, tensor: Tensor, num_entries: int, pairs: Sequence[tuple[int, int]]) -> None:
        """One after the other, which only matters where one reads what another writes."""
        if not pairs:
            return
        sources, destinations = zip(*pairs, strict=True)
        if not set(sources).isdisjoint(destinations) and len(pairs) > 1:
            for pair in pairs:
                self._copy_groups(tensor, num_entries, [pair])
            return
        self._kernel.copy(tensor, self._entries(sources, num_entries), self._entries(destinations, num_entries))

    def _entries(self, groups: Sequence[int], num_entries: int) -> Tensor:
        return indices([group * num_entries + i for group in groups for i in range(num_entries)], self._device)
