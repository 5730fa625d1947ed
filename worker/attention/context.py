"""What the forward pass is told about the batch, so that layers take only tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Cut = Callable[[Any, Tensor], Tensor]
"""Called by a cache layer with itself and its input, in place of its work; returns what its output will be."""


class ForwardContext(NamedTuple):
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


class forward_context:
    """Set the context around a forward pass. Refuses nesting; cleared whatever happens inside."""

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        global _current
        if _current is not None:
            raise RuntimeError("a forward pass is already running: forward contexts do not nest")
        _current = self._context

    def __exit__(self, *_error: object) -> None:
        global _current
        _current = None


def current_context() -> ForwardContext:
    """The running pass's context. Raises RuntimeError outside of one."""
    if _current is None:
        raise RuntimeError("no forward pass is running")
    return _current
