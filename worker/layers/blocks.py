"""The blocks that decoder-only models are made of. Module names are those of Hugging Face's checkpoints."""

from dataclasses import dataclass

from torch import Tensor, nn

from worker.kernels.interface import GqaSpec, QkNorm, RopeTable
from worker.layers.attention import GqaAttention
from worker.layers.linear import GatedLinear, MergedColumnLinear, RowLinear, shard_of
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Of the whole model, before sharding."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    """Of the four projections."""
    qk_norm_eps: float | None = None
    """RMS norm of each query and key head; None: there is none."""


class SelfAttention(nn.Module):
    """Projections around causal attention with K and V per head. Returns this rank's part of the sum over ranks."""

    def __init__(self, setup: LayerSetup, shape: AttentionShape, rope: RopeTable | None) -> None:
        super().__init__()
        dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
        parts = {"q_proj": (heads, dim), "k_proj": (kv_heads, dim), "v_proj": (kv_heads, dim)}
        self.qkv_proj = MergedColumnLinear(setup, shape.hidden_size, parts, shape.bias)
        self.o_proj = RowLinear(setup, heads, dim, shape.hidden_size, shape.bias)
        norm = None
        if shape.qk_norm_eps is not None:
            self.q_norm = RMSNorm(setup, dim, shape.qk_norm_eps)
            self.k_norm = RMSNorm(setup, dim, shape.qk_norm_eps)
            norm = QkNorm(self.q_norm.weight, self.k_norm.weight, shape.qk_norm_eps)
        self.spec = GqaSpec(
            num_heads=shard_of(heads, setup.tp, "q_proj")[1],
            num_kv_heads=shard_of(kv_heads, setup.tp, "k_proj")[1],
            head_dim=dim,
            scale=dim**-0.5,
            dtype=setup.cache_dtype or setup.dtype,
        )
        self.attention = GqaAttention(setup, self.spec, norm, rope)

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(of norm(residual + x), residual + x), of all tokens or of those `wanted`, int64 [W]; keys and values are
        kept of all."""
        qkv, residual = self.qkv_proj.of_norm(norm, x, residual)
        return self.o_proj(_rows(self.attention(qkv), wanted)), _rows(residual, wanted)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) × up(x)). Returns this rank's part of the sum over ranks."""

    def __init__(self, setup: LayerSetup, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": (intermediate_size, 1), "up_proj": (intermediate_size, 1)}
        self.size = intermediate_size
        """Of the whole model's."""
        self.gate_up_proj = GatedLinear(setup, hidden_size, parts, bias)
        self.down_proj = RowLinear(setup, intermediate_size, 1, hidden_size, bias)

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(of norm(residual + x), residual + x)"""
        hidden, residual = self.gate_up_proj.of_norm(norm, x, residual)
        return self.down_proj(hidden), residual


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it, which it may take into its first product, and a residual around
    it."""

    def __init__(self, setup: LayerSetup, attention: nn.Module, mlp: nn.Module, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(setup, hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(setup, hidden_size, eps)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x is this rank's part of what the layer before adds to the residual stream. `wanted`, int64 [W]: the tokens
        that the result is of; None: all."""
        x, residual = self.self_attn(self.input_layernorm, x, residual, wanted)
        return self.mlp(self.post_attention_layernorm, x, residual)


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
