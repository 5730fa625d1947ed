"""The operations that models and the runner are written in. One contract each, for every implementation.

Conventions: T tokens of a step, R rows, H query heads, K key/value heads (H a multiple of K), D head_dim, V vocabulary.
Activations are contiguous in their last dimension and of the dtype that the kernel was chosen for, unless said. Unless
an operation says that it works in place, it returns a new tensor that the caller owns. No operation of a step reads a
device value on the host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from worker.kernels.step import SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.weights import Dense, Weight
from worker.parallel.group import Group

SpecT = TypeVar("SpecT")
KernelT = TypeVar("KernelT")


@dataclass(frozen=True, slots=True)
class Operation(Generic[SpecT, KernelT]):
    """A row of the kernel table. `SpecT`: the shape that a kernel is chosen for, hashable; `KernelT`: its contract."""

    name: str


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
    copies: bool
    """Whether what it packs is memory of its own, and not the weight's."""

    def pack(self, weight: Weight) -> PackedWeight:
        """Bring a weight of the spec's kind into the layout that the product reads; the caller drops its copies."""

    def __call__(self, x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
        """x @ weightᵀ + bias; x [T, in] → [T, out], into `out` where given."""

    def of_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, packed: PackedWeight, *, is_gated: bool
    ) -> tuple[Tensor, Tensor] | None:
        """(product, or gated product, of the RMS norm of residual + x; residual + x), both new; None as in `gated`."""

    def gated(self, x: Tensor, packed: PackedWeight) -> Tensor | None:
        """silu(gate) × up, [T, out / 2], where the product's first half is the gate and the other one up; None where
        the kernel cannot do that in one pass, which may depend on the number of tokens."""


class TableKernel(LinearKernel, Protocol):
    """A linear kernel whose packed weight gives its rows back: a table that embeds tokens and is the head, too, is in
    memory once."""

    def rows(self, packed: PackedWeight, ids: Tensor) -> Tensor:
        """weight[ids]: ids int64 [T] → [T, in]."""


# --- attention over a paged cache with K and V per head


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """One kind of layer, on this rank. Layers of equal specs share a builder."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    """Of the cache: that of activations, or float8_e4m3."""
    window: int | None = None
    """A token sees the last so many tokens, itself included; None: all."""
    has_sinks: bool = False
    v_head_dim: int | None = None
    """Of values, where it is not `head_dim`."""
    rotary_dim: int | None = None
    """The first so many dimensions of a head are rotated, the others pass; None: all are."""

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


def is_plain(spec: GqaSpec) -> bool:
    """Whether values are as wide as keys, and rotated all over: many kernels know nothing else."""
    return spec.value_dim == spec.head_dim and spec.rotary_dim in (None, spec.head_dim)


@dataclass(frozen=True, slots=True)
class GqaCache:
    """One layer's part of the cache; what is in it and in which layout is the kernel's own affair."""

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    """What numbers of float8 are multiplied by."""
    v_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GqaPool:
    """The memory of all layers of one spec."""

    layers: list[GqaCache]
    entries: list[Tensor]
    """The same memory, blocks first: what zero, copy and swap touch."""


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norm of each query head and each key head."""

    q_weight: Tensor
    """[D]"""
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding, neox pairing (i with i + rotary_dim / 2)."""

    cos: Tensor
    """(c, c) of each position, [positions, rotary_dim]."""
    sin: Tensor
    """(−s, s)"""


GqaMetadata = Any
"""What `prepare` made of a step. Valid for that step, for the kernel that made it."""


class GqaKernel(Protocol):
    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        """A cache that is not cleared, and on a CPU not even touched: no kernel reads an entry that was not written.
        The last block is the spare one: its content is nobody's."""

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> GqaMetadata:
        """Work out, once a step, what all layers share (indices, masks)."""

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        """See `CacheBuilder.graph_contexts`."""

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        """See `CacheBuilder.all_steps`."""

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: GqaMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k, and write k and v where the step's token slots say.

        qkv [T, (H + K) × D + K × value_dim] → q [T, H, D], k [T, K, D] and v [T, K, value_dim]; may overwrite qkv. k
        and v are as the cache has them: rounded, where it is of float8, so that a token sees the same however the work
        is cut up.
        """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: GqaMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal attention of each token over its row's context: [T, H × value_dim]. k and v are this step's, written
        already.

        `sinks`, where the spec has them: [H], a logit of each head that is in the softmax's sum, with no value.
        Reads no cache entry outside a row's context: what is there may be NaN. Rows of the spare slot are undefined.
        """


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
GQA: Operation[GqaSpec, GqaKernel] = Operation("gqa")
PREPARE_STEP: Operation[None, PrepareKernel] = Operation("prepare_step")
REMEMBER: Operation[None, RememberKernel] = Operation("remember")
MOVE_ENTRIES: Operation[None, MoveKernel] = Operation("move_entries")
