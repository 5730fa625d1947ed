"""The operations that models and the runner are written in, but for those that have a file of their own (`gqa`, `mla`,
`delta`, `experts`, `sampling`, `decoder`). One contract each, for every implementation.

Conventions: T tokens of a step, R rows, H query heads, K key/value heads (H a multiple of K), D head_dim, V vocabulary.
Activations are contiguous in their last dimension and of the dtype that the kernel was chosen for, unless said. Unless
an operation says that it works in place, it returns a new tensor that the caller owns. No operation of a step reads a
device value on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from worker.kernels.operation import Operation
from worker.kernels.step import SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.weights import Dense, Weight
from worker.parallel.group import Group

# --- norms, activations, embedding

Activation = Literal["silu", "gelu_tanh"]
"""gelu_tanh: GELU by its approximation with the hyperbolic tangent (arXiv 1606.08415)."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    size: int
    has_float32_weight: bool = False
    """Whatever the dtype: of norms whose checkpoints hold the weight's difference from 1."""


class RmsNormKernel(Protocol):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x², last) + eps) × weight; x [..., N], weight [N]. The mean is taken in float32."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        """residual += sum of x over the group's ranks, **in place**; returns (norm(residual), residual). May overwrite
        x."""


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    size: int
    kind: Activation = "silu"


class GatedActivationKernel(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, 2N] holds gate and up side by side: activation(gate) × up, [T, N]. May overwrite x."""


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    hidden_size: int


class EmbeddingKernel(Protocol):
    def __call__(self, ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
        """table[ids]; ids int64 [T], table [V, N]. With `first` the table is a shard, whose first row is that token's:
        zeros where the shard does not have the token."""


# --- linear

PackedWeight = Any
"""What `pack` made of a weight. Only the kernel that made it can read it."""


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

    def gated(self, x: Tensor, packed: PackedWeight) -> Tensor | None:
        """silu(gate) × up, [T, out / 2], where the product's first half is the gate and the other one up; None where
        the kernel cannot do that in one pass, which may depend on the number of tokens."""
        return None


class TableKernel(LinearKernel, Protocol):
    """A linear kernel whose packed weight gives its rows back: a table that embeds tokens and is the head, too, is in
    memory once."""

    def rows(self, packed: PackedWeight, ids: Tensor) -> Tensor:
        """weight[ids]: ids int64 [T] → [T, in]."""


# --- rotary embedding


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding, neox pairing (i with i + rotary_dim / 2)."""

    cos: Tensor
    """(c, c) of each position, [positions, rotary_dim]."""
    sin: Tensor
    """(−s, s)"""


# --- the runner's own


class PrepareKernel(Protocol):
    def __call__(self, rows: StagedRows, slots: SlotTables, step: Step, block_size: int, out: StepBuffers) -> None:
        """Fill the beginning of `out` from what the device knows of the rows' slots."""


class RememberKernel(Protocol):
    def __call__(self, slots: SlotTables, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Sampled tokens become the last known ones of their sequences: in the slots `rows`, which differ, at these
        positions. All int64 [R]; a negative token id stands for none, and leaves a 0."""


class MoveKernel(Protocol):
    """Entries of a cache: `tensor` has them in its first dimension; indices are int64 on the device."""

    def zero(self, tensor: Tensor, entries: Tensor) -> None: ...

    def copy(self, tensor: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """All reads before all writes."""

    def swap_out(self, tensor: Tensor, host: Tensor, entries: Tensor, host_entries: Sequence[int]) -> None:
        """To the host's tensor, which is ready once the device got there. Ordered after the work submitted before."""

    def swap_in(self, tensor: Tensor, host: Tensor, entries: Tensor, host_entries: Sequence[int]) -> None:
        """From the host's tensor, ordered after earlier `swap_out`s."""


RMS_NORM: Operation[NormSpec, RmsNormKernel] = Operation("rms_norm")
GATED_ACTIVATION: Operation[ActivationSpec, GatedActivationKernel] = Operation("gated_activation")
EMBEDDING: Operation[EmbeddingSpec, EmbeddingKernel] = Operation("embedding")
LINEAR: Operation[LinearSpec, LinearKernel] = Operation("linear")
TABLE: Operation[LinearSpec, TableKernel] = Operation("table")
PREPARE_STEP: Operation[None, PrepareKernel] = Operation("prepare_step")
REMEMBER: Operation[None, RememberKernel] = Operation("remember")
MOVE_ENTRIES: Operation[None, MoveKernel] = Operation("move_entries")
