"""Weights on their way to a GPU: read into pinned memory, and copied from there while the next ones are read."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.kernels.weights import Blocks, Grouped
from worker.loader.checkpoint import Checkpoint, LazyTensor

CHUNK_BYTES = 32 << 20
"""Large enough for a copy at the full speed of the bus, small enough to be read while the one before is copied."""
NUM_BUFFERS = 2


class StagedCheckpoint:
    """A `Checkpoint` whose tensors are read onto a CUDA device, by any number of threads, in streams of their own.

    A thread that has read stays in its stream: what it does with a tensor comes after the copy. Threads of a pool that
    ends with the reading do; `torch.cuda.synchronize` tells when all is there.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._stages = _Stages(device, torch.cuda.current_stream(device).record_event())

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def tensor(self, name: str, packed: bool = False) -> LazyTensor:
        return _StagedTensor(self._checkpoint.tensor(name, packed), self)

    def to_device(self, tensor: Tensor) -> Tensor:
        """For the calling thread, and its stream."""
        return self._stages.stage.to_device(tensor)


class _StagedTensor:
    """A `LazyTensor`."""

    def __init__(self, tensor: LazyTensor, checkpoint: StagedCheckpoint) -> None:
        self._tensor, self._checkpoint = tensor, checkpoint
        self.shape = tensor.shape

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        return self._checkpoint.to_device(self._tensor.read(dim, start, length))

    def stored(self, dim: int, start: int, length: int) -> Blocks | Grouped | None:
        found = self._tensor.stored(dim, start, length)
        return None if found is None else found.through(self._checkpoint.to_device)


class _Stages(threading.local):
    """A stage for each thread: what is set here is set anew for each."""

    def __init__(self, device: torch.device, before: torch.cuda.Event) -> None:
        self.stage = _Stage(device, before)


class _Stage:
    """One thread's pinned buffers and stream."""

    def __init__(self, device: torch.device, before: torch.cuda.Event) -> None:
        """`before`: what must be done before the first copy."""
        self._device = device
        stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(stream)
        stream.wait_event(before)
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def to_device(self, tensor: Tensor) -> Tensor:
        on_device = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for source, target in chunks(tensor, on_device, CHUNK_BYTES):
            copied = self._copied[self._turn]
            if copied is not None:
                copied.synchronize()
            num_bytes = source.numel() * source.element_size()
            pinned = self._buffers[self._turn][:num_bytes].view(source.dtype).view(source.shape)
            copy_by_one_thread(pinned, source)
            target.copy_(pinned, non_blocking=True)
            self._copied[self._turn] = torch.cuda.current_stream().record_event()
            self._turn = (self._turn + 1) % NUM_BUFFERS
        return on_device


def copy_by_one_thread(target: Tensor, source: Tensor) -> None:
    """Between two tensors of one shape and type on the host. Torch would have all cores at it, for each reader."""
    np.copyto(_as_bytes(target), _as_bytes(source))


def _as_bytes(tensor: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return (tensor.unsqueeze(0) if tensor.dim() == 0 else tensor).view(torch.uint8).numpy()


def chunks(source: Tensor, target: Tensor, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Equal parts of two tensors of one shape, each of at most `num_bytes` (of `source`)."""
    if source.numel() * source.element_size() <= num_bytes:
        yield source, target
        return
    row_bytes = source[0].numel() * source.element_size()
    if row_bytes > num_bytes:
        for row_source, row_target in zip(source, target, strict=True):
            yield from chunks(row_source, row_target, num_bytes)
        return
    rows = num_bytes // row_bytes
    yield from zip(source.split(rows), target.split(rows), strict=True)
