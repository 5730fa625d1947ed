"""Cache builders: whoever knows a kind of attention owns its memory. Runner and scheduler are blind to what is in it.

A model lists its cache layers. Each has a spec; layers of equal specs share the builder that the spec makes. A new kind
of attention is one file: a spec, a layer and a builder.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from worker.attention.context import current_context
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec
from worker.kernels.select import Kernels
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class EntryTensor:
    """A part of the cache that zero, copy and swap must touch, entries first."""

    kind: PoolKind
    tensor: Tensor
    entries_per_request: int = 1
    """STATE: so many consecutive entries are a group."""


class CacheBuilder(Protocol):
    """Where rows may have drafts (`LayerSetup.num_drafts`), the next row of a request begins behind any token of the
    last one: it must find the cache as if there had been none behind that. Blocks are written anew from there on; a
    state has to be kept in a way that allows it."""

    def pool_specs(self) -> list[PoolSpec]:
        """What its layers need of this rank's memory."""

    def allocate(self, plan: PoolPlan) -> None:
        """Make its tensors, with one spare block or group beyond those of `plan`, and bind its layers to them, in place
        of what was bound before."""

    def entry_tensors(self) -> list[EntryTensor]:
        """Of what was allocated last."""

    def prepare(self, step: Step, buffers: StepBuffers) -> Any:
        """What its layers share in this step; they find it in the forward context under the builder's number."""

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        """Bounds of the context that are worth a graph each for a step of `num_rows` uniform rows, rising up to
        `max_context_len`: what `prepare` makes of a step with such a `max_context_len`, and the layers do with it,
        serves every step within the bound. Empty: such a step cannot be captured."""

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        """Steps within these bounds that together need every kernel that any of them can need; empty where kernels
        are not compiled."""


class CacheSpec(Hashable, Protocol):
    def make_builder(self, layers: Sequence[Any], number: int, kernels: Kernels, block_size: int) -> CacheBuilder:
        """For these layers, all of this spec. `number`: the builder's place in the forward context."""


class CacheLayer(nn.Module, ABC):
    """A layer that keeps something of each token or sequence in a cache."""

    owns_cache: ClassVar[bool] = True
    """Else it is another layer's, of the same spec, that a builder gives it to."""

    def __init__(self, spec: CacheSpec, output_size: int) -> None:
        super().__init__()
        self.spec, self.output_size = spec, output_size

    def forward(self, x: Tensor) -> Tensor:
        """[T, ...], which may be overwritten → [T, output_size]."""
        cut = current_context().cut
        return self.attend(x) if cut is None else cut(self, x)

    @abstractmethod
    def attend(self, x: Tensor) -> Tensor:
        """The layer's work, in the forward context of a step."""


def make_builders(layers: Sequence[CacheLayer], kernels: Kernels, block_size: int) -> list[CacheBuilder]:
    """One for each spec, in the order of the layers."""
    by_spec: dict[CacheSpec, list[CacheLayer]] = {}
    for layer in layers:
        by_spec.setdefault(layer.spec, []).append(layer)
    return [spec.make_builder(same, number, kernels, block_size) for number, (spec, same) in enumerate(by_spec.items())]
