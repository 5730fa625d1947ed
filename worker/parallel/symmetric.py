"""Sums over the GPUs of one host through memory that each of them reads directly (torch's symmetric memory).

NCCL takes 18 µs for the smallest sum, and a model asks for two a layer. Here the ranks meet in flags in each other's
memory, each adds up its share of all ranks' numbers and reads the others' shares: 7 µs for the smallest, about half of
NCCL's time up to 8 MiB (two H100s, bf16 rows of 4,096, inside a graph). It is one kernel, knows nothing of the
host, and can be captured.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from worker.parallel.gathering import BYTES, Gathering

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Of 8,192 tokens of 4,096 in 16 bits, where NCCL was no faster on two H200s."""
NUM_PLACES = 2
ALIGNMENT = 16
INBOX_ROWS = 64
"""Of the sums of decode steps; larger ones are bound by bandwidth, of which flags take half."""
INBOX_WORDS = 4096
"""A row of 8,192 elements in 16 bits."""
DTYPES = (torch.bfloat16, torch.float32)
"""What torch's operation adds up."""


@dataclass(slots=True)
class Inboxes:
    """Memory of each rank that the others write to, for kernels that send and wait themselves. A message is a row of a
    sum, of at most `num_words` words of 32 bits."""

    addresses: Tensor
    """int64 [ranks], on the device: where each rank's inbox begins; int32 [rows, 2, ranks, num_words], by row, by the
    row's turn, by sender. All −1 where nothing is, as at first."""
    turns: Tensor
    """int32 [rows]: 0 or 1, of each row's next message, the same on all ranks."""
    num_words: int
    rank: int
    memory: Tensor
    """This rank's inbox, which lives as long as this."""
    _sent: Tensor | None = None
    """The part that is under way."""

    @property
    def num_rows(self) -> int:
        """That messages can be of."""
        return len(self.turns)

    def hold(self, x: Tensor) -> bool:
        """Whether there is room for these rows, [R, N] of 16 or 32 bits."""
        row_bytes = x.shape[1] * x.element_size()
        return 0 < len(x) <= self.num_rows and row_bytes <= 4 * self.num_words and row_bytes % 4 == 0

    def keep(self, part: Tensor) -> Tensor:
        """What stands for a part of a sum that was sent. Nothing else is sent before it is taken, or its message would
        be taken for the next one."""
        assert self._sent is None
        self._sent = part
        return part

    def take(self, part: Tensor) -> bool:
        """Whether it was sent; now the others' are received."""
        sent, self._sent = self._sent, None
        assert sent is None or sent is part
        return sent is not None

    @property
    def is_awaited(self) -> bool:
        """Whether what was sent last is still to be taken."""
        return self._sent is not None

    @classmethod
    def of(cls, memory: Tensor, addresses: list[int], rank: int) -> "Inboxes":
        """Of memory that is `inbox_bytes` long and −1 on every rank, of which `memory` is this one's."""
        device = memory.device
        turns = torch.zeros(INBOX_ROWS, dtype=torch.int32, device=device)
        return cls(torch.tensor(addresses, dtype=torch.int64, device=device), turns, INBOX_WORDS, rank, memory)


def inbox_bytes(num_ranks: int) -> int:
    return INBOX_ROWS * 2 * num_ranks * INBOX_WORDS * 4


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a sum, where each rank reads them."""

    addresses: Tensor
    """int64 [ranks], on the device: of each rank's memory."""
    offset: int
    """Bytes behind each address, where that rank's part begins."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks' buffers, for kernels that read parts of sums where they are."""

    addresses: Tensor
    """int64 [ranks], on the device."""
    meet: Callable[[], object]
    """Ends, on the device, once all ranks have come to it."""


class SymmetricSums:
    """Two places, which parts of sums, or sums, take in turns: each is valid until the second next one is asked for.

    All ranks must ask alike, so that the parts of a sum are in the same place on each. An operation ends on a rank once
    all ranks have read what they need of it, so that it may overwrite the place at once.
    """

    def __init__(
        self,
        buffer: Tensor,
        reduce: Callable[[Tensor], object],
        inboxes: Inboxes | None = None,
        gathering: Gathering | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`buffer`: bytes, at the same offsets on each rank. `reduce` adds up a part of it in place. `peers`: None
        where that is faster in any case."""
        self.inboxes, self.gathering = inboxes, gathering
        self._places = buffer.chunk(NUM_PLACES)
        self._turn = 0
        self._reduce = reduce
        self._peers = peers
        self._addresses = range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())

    def place(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Where this rank's part of a sum can be written, so that it is not copied; None if it is not for us."""
        num_bytes = prod(shape) * dtype.itemsize
        if dtype not in DTYPES or num_bytes % ALIGNMENT or not 0 < num_bytes <= self._places[0].numel():
            return None
        self._turn = (self._turn + 1) % NUM_PLACES
        return self._places[self._turn][:num_bytes].view(dtype).view(shape)

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """The sum over ranks, in a place of ours; None if x is not for us. What was sent is for a norm alone: there is
        nothing in the tensor that stands for it."""
        assert self.inboxes is None or not self.inboxes.is_awaited
        if x.data_ptr() in self._addresses:
            self._reduce(x)
            return x
        place = self.place(x.shape, x.dtype)
        if place is not None:
            self._reduce(place.copy_(x))
        return place

    def parts(self, x: Tensor) -> Parts | None:
        """Of the sum that x is this rank's part of, if it is in a place of ours. They can be read until the next sum:
        nobody ends that before all have begun it, and its own place is the other one."""
        if self._peers is None or x.data_ptr() not in self._addresses:
            return None
        self._peers.meet()
        return Parts(self._peers.addresses, x.data_ptr() - self._addresses.start)


def symmetric_sums(group: dist.ProcessGroup, device: torch.device, *, is_one_host: bool) -> SymmetricSums | None:
    """None where the machine cannot: then NCCL does it. Collective; all ranks decide alike.

    `group` are the ranks 0, 1, … of their hosts, each on the device of that number.
    """
    if device.type != "cuda":
        return None
    can = is_one_host and torch.version.hip is None and _all_see_each_other(group.size())
    if not _all_agree(can, group, device):
        logger.info("sums over ranks: NCCL alone, the GPUs do not read each other's memory")
        return None
    try:
        sums = _allocate(group, device)
    except (RuntimeError, AttributeError) as error:
        logger.warning("no symmetric memory: %s", str(error).splitlines()[0])
        sums = None
    # Nobody enters the operation unless all do.
    works = _all_agree(sums is not None, group, device) and sums is not None and _is_right(sums, group.size(), device)
    if not _all_agree(works, group, device):
        logger.warning("sums over ranks: NCCL alone, symmetric memory does not work here")
        return None
    logger.info("sums over ranks: symmetric memory up to %d MiB, NCCL above", MAX_BYTES >> 20)
    return sums


def _allocate(group: dist.ProcessGroup, device: torch.device) -> SymmetricSums:
    # Multicast is not used, and to set it up takes a switch's resources.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric_memory

    operation = torch.ops.symm_mem.two_shot_all_reduce_
    buffer = symmetric_memory.empty(NUM_PLACES * MAX_BYTES, dtype=torch.uint8, device=device)
    places = symmetric_memory.rendezvous(buffer, group)
    inbox = symmetric_memory.empty(inbox_bytes(group.size()), dtype=torch.uint8, device=device).fill_(255)
    addresses = list(symmetric_memory.rendezvous(inbox, group).buffer_ptrs)
    torch.cuda.synchronize(device)  # nobody sends before all of them are empty: what follows is collective
    name, rank, size = group.group_name, group.rank(), group.size()
    rows = symmetric_memory.empty(BYTES, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(rows, group)
    return SymmetricSums(
        buffer,
        lambda part: operation(part, "sum", name),
        Inboxes.of(inbox, addresses, rank),
        Gathering(handle.get_buffer(0, (BYTES,), torch.uint8), rows, handle, rank, size),
        # Of more ranks each part is read by so many that it takes longer than to add up shares and to exchange them.
        Peers(torch.tensor(list(places.buffer_ptrs), device=device), places.barrier) if size == 2 else None,
    )


def _is_right(sums: SymmetricSums, size: int, device: torch.device) -> bool:
    total = sums.all_reduce(torch.ones(ALIGNMENT, dtype=torch.float32, device=device))
    return total is not None and bool((total == size).all())


def _all_see_each_other(size: int) -> bool:
    return torch.cuda.device_count() >= size and all(
        torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(size), 2)
    )


def _all_agree(flag: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    agreed = torch.tensor(int(flag), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return bool(agreed)
