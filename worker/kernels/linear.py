"""Linear layers: the product with a weight, in whatever form the weight is. Conventions are those of `operation`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from worker.kernels.operation import Operation
from worker.kernels.weights import Dense, Weight
from worker.parallel.symmetric import Inboxes

PackedWeight = Any
"""What `pack` made of a weight. Only the kernel that made it can read it."""

Finder = Callable[[Tensor], Tensor]
"""x [T, in] → what `ChooseKernel` makes of the product if all rows are greedy, int64 [T]. The product is nowhere."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    in_features: int
    out_features: int
    kind: type[Weight] = Dense


class LinearKernel(Protocol):
    copies: bool = False
    """Whether what it packs is memory of its own, and not the weight's."""

    def pack(self, weight: Weight) -> PackedWeight:
        """Bring a weight of the spec's kind into the layout that the product reads; the caller drops its copies."""

    def __call__(self, x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
        """x @ weightᵀ + bias; x [T, in] → [T, out], into `out` where given."""

    def of_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, packed: PackedWeight, *, is_gated: bool
    ) -> tuple[Tensor, Tensor] | None:
        """(product, or gated product, of the RMS norm of residual + x; residual + x), both new; None as in `gated`."""
        return None

    def sent(self, x: Tensor, packed: PackedWeight, inboxes: Inboxes) -> Tensor | None:
        """Stands for the product, a part of a sum, which goes to all ranks while it is computed and is nowhere else:
        the norm that takes it receives all parts (`Inboxes.take`). None as in `gated`."""
        return None

    def gated(self, x: Tensor, packed: PackedWeight) -> Tensor | None:
        """silu(gate) × up, [T, out / 2], where the product's first half is the gate and the other one up; None where
        the kernel cannot do that in one pass, which may depend on the number of tokens."""
        return None

    def finder(self, packed: PackedWeight) -> Finder | None:
        """Of this weight; None where the kernel can only choose from a whole product."""
        return None


class TableKernel(LinearKernel, Protocol):
    """A linear kernel whose packed weight gives its rows back: a table that embeds tokens and is the head, too, is in
    memory once."""

    def rows(self, packed: PackedWeight, ids: Tensor) -> Tensor:
        """weight[ids]: ids int64 [T] → [T, in]."""


LINEAR: Operation[LinearSpec, LinearKernel] = Operation("linear")
TABLE: Operation[LinearSpec, TableKernel] = Operation("table")
