"""What the forward pass is told about the batch, so that layers take only tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from worker.kernels.interface import AttentionPlan


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Valid for one forward pass. Tokens are in the runner's order: rows with one token first."""

    positions: Tensor
    """int64 [T]"""
    token_slots: Tensor
    """int64 [T]: where each token's K and V go in the cache."""
    num_decode_tokens: int
    """The first this many tokens are one row each; the others belong to longer rows."""
    attention: AttentionPlan


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
