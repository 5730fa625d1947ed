"""A device whose graphs are recorded on the CPU: each operation with its tensors, played again into the same memory.

What CUDA would do with memory, that graphs share a pool, is not imitated: tests on a GPU see to that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, old in self.operations:
            new = func(*args, **kwargs)
            for into, value in zip(tree_leaves(old), tree_leaves(new), strict=True):
                if isinstance(into, Tensor) and into.layout == torch.strided and into.data_ptr() != value.data_ptr():
                    into.copy_(value)


class RecordedGraphs:
    """See `GraphDevice`. While it records, work is done all the same."""

    rehearses = True

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.is_recording = True
        yield
        self.is_recording = False

    def begin(self) -> RecordedGraph:
        assert self.is_recording
        graph = RecordedGraph()
        graph.__enter__()
        self.graphs.append(graph)
        return graph

    def marks(self) -> None:
        return None

    def alias(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return tensor
