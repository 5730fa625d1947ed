"""CUDA's graphs: see `worker.runner.graphs`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from worker.runner.graphs import Graph
from worker.runner.timer import GpuTiming, Timing


class CudaGraphs:
    """See `GraphDevice`."""

    rehearses = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """On a stream of its own: the default one cannot be captured."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    def begin(self) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def marks(self) -> Timing | None:
        return None if torch.version.hip is not None else GpuTiming(is_captured=True)

    def alias(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


class _Address:
    """The memory of a tensor, as the CUDA array interface describes it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
