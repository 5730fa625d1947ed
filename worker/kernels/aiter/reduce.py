"""Sums over the GPUs of one host through AITER's all-reduce, which reads the peers' memory."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from worker.kernels.aiter import package
from worker.parallel.group import Group

COMMUNICATORS = "aiter.dist.device_communicators.custom_all_reduce"


class PeerReduce:
    """One for each group. What AITER has not or cannot do (odd sizes, ranks of several hosts) the group does itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._make = package.operation(COMMUNICATORS, "CustomAllreduce")
        self._communicators: dict[dist.ProcessGroup, Any] = {}

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        """The sum over ranks; may be x itself, overwritten. Collective: all ranks of the group call it alike."""
        if group.size == 1:
            return x
        reduced: Tensor | None = self._communicator(group).custom_all_reduce(x) if self._make is not None else None
        return group.all_reduce(x) if reduced is None else reduced

    def _communicator(self, group: Group) -> Any:
        """Made at the first call, which is the warm-up's: all ranks are there, and no graph is being captured."""
        assert group.handle is not None and self._make is not None
        if group.handle not in self._communicators:
            # Ranks exchange the handles of their memory over the host: the group must not be one of GPUs.
            ranks = dist.get_process_group_ranks(group.handle)
            over_host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self._communicators[group.handle] = self._make(over_host, self._device)
        return self._communicators[group.handle]
