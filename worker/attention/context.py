"""What the forward pass is told about the batch, so that layers take only tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Cut = Callable[[Any, Tensor], Tensor]
"""Called by a cache layer with itself and its input, in place of its work; returns what its output will be."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Valid for one forward pass."""

    metadata: tuple[Any, ...]
    """Of the step, from each cache builder in turn."""
    cut: Cut | None = None
    """While a graph is captured piece by piece, which ends and begins anew at each cache layer."""
    wanted: Tensor | None = None
    """int64 [W]: the tokens whose last hidden state somebody reads; None: all."""
    num_exchanged: int | None = None
    """Tokens that each data-parallel rank passes to its experts, the same on all of them and no fewer than a layer
    has; None: those that the layer has, which are as many on the others."""
    positions: Tensor | None = None
    """int64 [T]: where the tokens stand in their sequences, for models that do not leave that to their cache layers;
    None while a graph is captured."""


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Set the context around a forward pass. Refuses nesting; cleared whatever happens inside."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward pass is already running: forward contexts do not nest")
    _current = context
    try:
        yield
    finally:
        _current = None


def current_context() -> ForwardContext:
    """The running pass's context. Raises RuntimeError outside of one."""
    if _current is None:
        raise RuntimeError("no forward pass is running")
    return _current
