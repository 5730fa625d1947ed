"""The operation of attention over a paged cache with K and V per head (MHA, GQA, MQA; arXiv 2305.13245).

Conventions are those of `operation`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.kernels.elementwise import RopeTable
from worker.kernels.operation import CacheKernel, Operation
from worker.kernels.step import Step, StepBuffers

SCALE_BYTES = 4
"""Of one beside whole numbers: float32."""
INT8_TOKENS = 16
"""A block of int8 has so many, or a multiple."""


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """One kind of layer, on this rank. Layers of equal specs share a builder."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    """Of the cache: that of activations, float8_e4m3, or, beside float32, bfloat16 or int8 with scales."""
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

    @property
    def token_bytes(self) -> int:
        """What a layer's cache has of one: of int8 with a scale for each head's key and each head's value."""
        scales = 2 * SCALE_BYTES if self.dtype == torch.int8 else 0
        return self.num_kv_heads * ((self.head_dim + self.value_dim) * self.dtype.itemsize + scales)


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


GqaMetadata = Any
"""What `prepare` made of a step. Valid for that step, for the kernel that made it."""


class GqaKernel(CacheKernel, Protocol):
    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> GqaPool:
        """A cache that is not cleared, and on a CPU not even touched: no kernel reads an entry that was not written.
        The last block is the spare one: its content is nobody's."""

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> GqaMetadata:
        """Work out, once a step, what all layers share (indices, masks)."""

    def write_qkv(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: GqaMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k, and write k and v where the step's token slots say.

        qkv [T, (H + K) × D + K × value_dim] → q [T, H, D], k [T, K, D] and v [T, K, value_dim]; may overwrite qkv. k
        and v are as the cache has them: rounded, where it has fewer bits, so that a token sees the same however the
        work is cut up.
        """

    def write_and_attend(
        self, qkv: Tensor, norm: QkNorm | None, rope: RopeTable | None, cache: GqaCache, metadata: GqaMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """`write_qkv` and `attend` in one; None where the kernel cannot do that, which may depend on the step."""
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: GqaCache, metadata: GqaMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal attention of each token over its row's context: [T, H × value_dim]. k and v are this step's, written
        already.

        `sinks`, where the spec has them: [H], a logit of each head that is in the softmax's sum, with no value.
        Reads no cache entry outside a row's context: what is there may be NaN. Rows of the spare slot are undefined.
        """


GQA: Operation[GqaSpec, GqaKernel] = Operation("gqa")
