"""Multi-head latent attention and its projections (DeepSeek-V2, arXiv 2405.04434), with the index of DeepSeek-V3.2
where the shape has one. Module names are those of Hugging Face's checkpoints."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.attention.context import current_context
from worker.attention.interface import CacheLayer
from worker.attention.mla import MlaCacheSpec
from worker.kernels.elementwise import RopeTable
from worker.kernels.mla import INDEX, MLA, IndexNorm, IndexSpec, LatentNorm, MlaSpec
from worker.layers.linear import MergedColumnLinear, RowLinear, shard_of
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget

LATENT_EPS = 1e-6
"""Of the norms of latents and of the index, whatever the model's other norms have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Of the whole model, before sharding; the letters are those of `worker.kernels.mla`."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """Of the queries' own latent; None: they have none."""
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    scale: float
    is_interleaved: bool = True
    bias: bool = False
    """Of the projections to latents and of the last one."""
    index: IndexShape | None = None
    """Needs a latent of the queries."""


class LatentSelfAttention(nn.Module):
    """In place of a `SelfAttention`. Latents are on all ranks, heads are sharded."""

    def __init__(self, setup: LayerSetup, shape: MlaShape, rope: RopeTable) -> None:
        super().__init__()
        heads, head_dim = shape.num_heads, shape.nope_dim + shape.rope_dim
        row = {"kv_a_proj_with_mqa": (1, shape.latent_dim + shape.rope_dim)}
        self._q_lora_rank = shape.q_lora_rank
        if shape.q_lora_rank is None:
            self.qkv_a_proj = MergedColumnLinear(setup, shape.hidden_size, {"q_proj": (heads, head_dim)} | row)
        else:
            parts = {"q_a_proj": (1, shape.q_lora_rank)} | row
            self.qkv_a_proj = MergedColumnLinear(setup, shape.hidden_size, parts, shape.bias)
            self.q_a_layernorm = RMSNorm(setup, shape.q_lora_rank, LATENT_EPS)
            self.q_b_up_proj = MergedColumnLinear(setup, shape.q_lora_rank, {"q_b_proj": (heads, head_dim)})
        self.kv_a_layernorm = RMSNorm(setup, shape.latent_dim, LATENT_EPS)
        self.kv_b_proj = Expansion(setup, heads, shape.nope_dim + shape.v_head_dim, shape.latent_dim)
        self.o_proj = RowLinear(setup, heads, shape.v_head_dim, shape.hidden_size, shape.bias)
        self.indexer = None if shape.index is None else Indexer(setup, shape, shape.index)
        spec = MlaSpec(
            num_heads=self.kv_b_proj.num_heads,
            latent_dim=shape.latent_dim,
            rope_dim=shape.rope_dim,
            nope_dim=shape.nope_dim,
            v_head_dim=shape.v_head_dim,
            scale=shape.scale,
            dtype=setup.dtype,
            is_interleaved=shape.is_interleaved,
        )
        self.attention = LatentAttention(setup, spec, self.kv_a_layernorm, self.kv_b_proj, rope, self.indexer)

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `SelfAttention.forward`."""
        if self.indexer is None:
            x, residual = self.qkv_a_proj.of_norm(norm, x, residual)
            x = self._queries_and_row(x)[0]
        else:
            hidden, residual = norm.add_norm(x, residual)
            x, q_latent = self._queries_and_row(self.qkv_a_proj(hidden))
            x = torch.cat((x, *self.indexer(hidden, q_latent)), 1)
        x = self.attention(x)
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        return self.o_proj(x), residual

    def _queries_and_row(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """([T, H × (N + P) + L + P], the queries' latent, or what stands in its place)"""
        if self._q_lora_rank is None:
            return x, x
        q_latent = self.q_a_layernorm(x[:, : self._q_lora_rank])
        return torch.cat((self.q_b_up_proj(q_latent), x[:, self._q_lora_rank :]), 1), q_latent


class LatentAttention(CacheLayer):
    """Causal attention over the paged cache, this rank's heads."""

    def __init__(
        self, setup: LayerSetup, spec: MlaSpec, norm: RMSNorm, expansion: "Expansion", rope: RopeTable,
        indexer: "Indexer | None",
    ) -> None:  # fmt: skip
        index = None if indexer is None else indexer.spec
        super().__init__(MlaCacheSpec(spec, index), spec.num_heads * spec.v_head_dim)
        self._kernel = setup.kernels.choose(MLA, spec, setup.dtype)
        self._index = None if index is None else setup.kernels.choose(INDEX, index, setup.dtype)
        self._index_norm = None if indexer is None else indexer.k_norm.norm
        self._norm, self._expand, self._rope = LatentNorm(norm.weight, norm.eps), expansion.weight, rope
        self._width = spec.num_heads * spec.head_dim + spec.row_dim
        self._number, self._cache = 0, torch.empty(0)
        self._index_cache: Tensor | None = None

    def bind(self, number: int, cache: Tensor, index_cache: Tensor | None) -> None:
        """`number`: of the builder, which owns the caches."""
        self._number, self._cache, self._index_cache = number, cache, index_cache

    def attend(self, x: Tensor) -> Tensor:
        """Queries, the token's row, and what the index needs, side by side → [T, H × V]."""
        metadata, chosen = current_context().metadata[self._number], None
        if self._index is not None and self._index_norm is not None and self._index_cache is not None:
            q, weights = self._index.write(
                x[:, self._width :], self._index_norm, self._rope, self._index_cache, metadata.index
            )
            chosen = self._index.choose(q, weights, self._index_cache, metadata.index)
            x, metadata = x[:, : self._width], metadata.attention
        q_nope, q_rope = self._kernel.write(x, self._norm, self._rope, self._cache, metadata)
        return self._kernel.attend(q_nope, q_rope, self._cache, self._expand, metadata, chosen)


class Expansion(WeightedLayer):
    """What makes keys and values of a latent: [heads of this rank, N + V, L]. Absorbed attention multiplies with it
    head by head, from either side, so it stays as it is loaded."""

    def __init__(self, setup: LayerSetup, num_heads: int, width: int, latent_dim: int) -> None:
        super().__init__()
        first, self.num_heads = shard_of(num_heads, setup.tp, "kv_b_proj")
        self._first_row, self._total = first * width, num_heads * width
        self.weight = torch.empty(self.num_heads, width, latent_dim, dtype=setup.dtype, device=setup.device)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {f"{path}.weight": self._load}

    def weights(self) -> Iterable[Tensor]:
        return [self.weight]

    def _load(self, tensor: LazyTensor) -> None:
        rows = self.weight.flatten(0, 1)
        expect_shape(tensor, (self._total, rows.shape[1]))
        rows.copy_(tensor.read(0, self._first_row, len(rows)))


class Indexer(nn.Module):
    """Queries, key and weights of the index, the same on every rank."""

    def __init__(self, setup: LayerSetup, shape: MlaShape, index: IndexShape) -> None:
        super().__init__()
        assert shape.q_lora_rank is not None
        self.spec = IndexSpec(index.num_heads, index.head_dim, shape.rope_dim, index.top_k, setup.dtype)
        self.q_proj = MergedColumnLinear(setup, shape.q_lora_rank, {"wq_b": (1, index.num_heads * index.head_dim)})
        self.k_proj = MergedColumnLinear(setup, shape.hidden_size, {"wk": (1, index.head_dim)})
        self.head_weights = MergedColumnLinear(setup, shape.hidden_size, {"weights_proj": (1, index.num_heads)})
        self.k_norm = KeyNorm(setup, index.head_dim)

    def forward(self, hidden: Tensor, q_latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden], normed → [T, H × D], [T, D], [T, H]"""
        return self.q_proj(q_latent), self.k_proj(hidden), self.head_weights(hidden)


class KeyNorm(WeightedLayer):
    """Layer norm; the kernel that writes the key applies it."""

    def __init__(self, setup: LayerSetup, size: int) -> None:
        super().__init__()
        weight, bias = (make(size, dtype=setup.dtype, device=setup.device) for make in (torch.ones, torch.zeros))
        self.norm = IndexNorm(weight, bias, LATENT_EPS)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {
            f"{path}.weight": lambda tensor: self._load(self.norm.weight, tensor),
            f"{path}.bias": lambda tensor: self._load(self.norm.bias, tensor),
        }

    def weights(self) -> Iterable[Tensor]:
        return [self.norm.weight, self.norm.bias]

    def _load(self, into: Tensor, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(into.shape))
        into.copy_(tensor.read())
