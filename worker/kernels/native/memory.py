"""Memory of weights and cache: on large pages where the system has them, since a step reads all of it."""

import mmap
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
LINE = 64


class Arena:
    """Hands out pieces of large mappings. A mapping lives as long as any tensor of it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeros, at the beginning of a cache line."""
        size = -(-num_bytes // LINE) * LINE
        if len(self._chunk) - self._used < size:
            self._chunk, self._used = mapped(max(size, CHUNK_BYTES)), 0
        place = self._chunk[self._used : self._used + num_bytes]
        self._used += size
        return place


def mapped(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], zeros that take no memory until they are touched."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


@cache
def arena() -> Arena:
    """This process's."""
    return Arena()
