"""The operations of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and of the index that chooses what it
reads (DeepSeek-V3.2).

Conventions are those of `operation`. Of a token the cache has one row for all heads: a latent of L numbers, from which
each head's key and value follow, and P numbers that are rotated. A head's query has N numbers that meet the key and P
that meet the rotated ones; its value has V.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.kernels.elementwise import RopeTable
from worker.kernels.operation import CacheKernel, Operation
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """One kind of layer, on this rank. All ranks have the whole cache."""

    num_heads: int
    latent_dim: int
    """L"""
    rope_dim: int
    """P"""
    nope_dim: int
    """N"""
    v_head_dim: int
    """V"""
    scale: float
    dtype: torch.dtype
    """Of the cache."""
    is_interleaved: bool = True
    """Rotation pairs 2i with 2i + 1; else i with i + P / 2. What is rotated is stored in halves either way."""

    @property
    def row_dim(self) -> int:
        """Of a token's row in the cache."""
        return self.latent_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Of a query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class LatentPool:
    """The memory of all layers of one spec."""

    layers: list[Tensor]
    entries: list[Tensor]
    """The same memory, blocks first: what zero, copy and swap touch."""


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """RMS norm of the latent."""

    weight: Tensor
    """[L]"""
    eps: float


MlaMetadata = Any
"""What `prepare` made of a step. Valid for that step, for the kernel that made it."""


class MlaKernel(CacheKernel, Protocol):
    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> LatentPool:
        """As `GqaKernel.allocate`."""

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> MlaMetadata:
        """Work out, once a step, what all layers share."""

    def write(
        self, x: Tensor, norm: LatentNorm, rope: RopeTable, cache: Tensor, metadata: MlaMetadata
    ) -> tuple[Tensor, Tensor]:
        """Rotate the queries; norm the latent, rotate what goes with it, and write both where the token slots say.

        x [T, H × (N + P) + L + P]: the queries, then the row → the queries' plain parts [T, H, N] and rotated ones
        [T, H, P]; may overwrite x. The table is of P.
        """

    def attend(
        self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, expand: Tensor, metadata: MlaMetadata,
        chosen: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of each token over its row's context, which is written already: [T, H × V].

        `expand` [H, N + V, L]: what makes a head's key (without the rotated part) and value of a latent. `chosen`: see
        `IndexKernel.choose`; None: the whole context. Reads no cache entry outside a row's context: what is there may
        be NaN. Rows of the spare slot are undefined.
        """


# --- the index


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Each token has `num_heads` queries and one key of D numbers, the first P of which are rotated (i with i + P / 2).
    All ranks have all of it."""

    num_heads: int
    head_dim: int
    """D"""
    rope_dim: int
    """P"""
    top_k: int
    dtype: torch.dtype
    """Of the cache."""

    @property
    def width(self) -> int:
        """Of what a token brings: queries, key, and a weight for each query."""
        return (self.num_heads + 1) * self.head_dim + self.num_heads


@dataclass(frozen=True, slots=True)
class IndexNorm:
    """Layer norm of the key."""

    weight: Tensor
    """[D]"""
    bias: Tensor
    eps: float


class IndexKernel(CacheKernel, Protocol):
    """Its cache has the keys."""

    def allocate(self, num_layers: int, num_blocks: int, block_size: int, device: torch.device) -> LatentPool:
        """As `GqaKernel.allocate`."""

    def prepare(self, step: Step, buffers: StepBuffers, block_size: int) -> Any:
        """Work out, once a step, what all layers share."""

    def write(self, x: Tensor, norm: IndexNorm, rope: RopeTable, cache: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        """Norm the key, rotate it and the queries, and write it where the token slots say.

        x [T, width]: queries, key, weights → queries [T, H, D], weights [T, H]; may overwrite x.
        """

    def choose(self, q: Tensor, weights: Tensor, cache: Tensor, metadata: Any) -> Tensor | None:
        """The `top_k` tokens up to each token's own with the highest sum over heads of weight × max(0, query · key), of
        equal sums the earliest: int32 [T, top_k] of token slots (block × block_size + offset), in no order; −1 where
        there are fewer. None where no row of the step has more tokens, so that all are chosen."""


MLA: Operation[MlaSpec, MlaKernel] = Operation("mla")
INDEX: Operation[IndexSpec, IndexKernel] = Operation("mla_index")
