"""The blocks that decoder-only models are made of. Module names are those of Hugging Face's checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.kernels.elementwise import Activation, RopeTable
from worker.kernels.gqa import GqaSpec, QkNorm
from worker.layers.attention import GqaAttention, Sinks
from worker.layers.linear import GatedLinear, MergedColumnLinear, RowLinear, shard_of, shard_or_copy
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Of one layer of the whole model, before sharding."""

    hidden_size: int
    input_size: int | None = None
    """Of what is projected to queries, keys and values, where it is not `hidden_size`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    """Of values, where it is not `head_dim`."""
    bias: bool = False
    """Of the projections to queries, keys and values."""
    output_bias: bool = False
    qk_norm_eps: float | None = None
    """RMS norm of each query and key head; None: there is none."""
    has_offset_norms: bool = False
    """See `RMSNorm`."""
    rotary_dim: int | None = None
    """The first so many dimensions of a head are rotated; None: all."""
    window: int | None = None
    """A token sees the last so many, itself included; None: all."""
    has_sinks: bool = False
    scale: float | None = None
    """Of scores; None: head_dim ** −0.5."""
    value_scale: float = 1.0
    """Of what attention makes of the values."""
    is_gated: bool = False
    """Each head's output is multiplied by the logistic function of a gate, which the projection to queries gives behind
    each head's query."""


class SelfAttention(nn.Module):
    """Projections around causal attention with K and V per head. Returns this rank's part of the sum over ranks."""

    def __init__(self, setup: LayerSetup, shape: AttentionShape, rope: RopeTable | None) -> None:
        super().__init__()
        self.shape = shape
        dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
        value_dim = shape.v_head_dim or dim
        query_width = 2 * dim if shape.is_gated else dim
        parts = {"q_proj": (heads, query_width), "k_proj": (kv_heads, dim), "v_proj": (kv_heads, value_dim)}
        self.qkv_proj = MergedColumnLinear(setup, shape.input_size or shape.hidden_size, parts, shape.bias)
        self.o_proj = RowLinear(setup, heads, value_dim, shape.hidden_size, shape.output_bias)
        norm = None
        if shape.qk_norm_eps is not None:
            self.q_norm = RMSNorm(setup, dim, shape.qk_norm_eps, is_offset=shape.has_offset_norms)
            self.k_norm = RMSNorm(setup, dim, shape.qk_norm_eps, is_offset=shape.has_offset_norms)
            norm = QkNorm(self.q_norm.weight, self.k_norm.weight, shape.qk_norm_eps)
        if shape.has_sinks:
            self.sinks = Sinks(setup, heads)
        spec = GqaSpec(
            num_heads=shard_of(heads, setup.tp, "q_proj")[1],
            num_kv_heads=shard_or_copy(kv_heads, setup.tp, "k_proj")[1],
            head_dim=dim,
            scale=dim**-0.5 if shape.scale is None else shape.scale,
            dtype=setup.dtype,
            window=shape.window,
            has_sinks=shape.has_sinks,
            v_head_dim=None if value_dim == dim else value_dim,
            rotary_dim=None if shape.rotary_dim == dim else shape.rotary_dim,
        )
        self.spec = setup.with_cache(spec)
        self.attention = GqaAttention(setup, self.spec, norm, rope, self.sinks.logits if shape.has_sinks else None)

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(of norm(residual + x), residual + x), of all tokens or of those `wanted`, int64 [W]; keys and values are
        kept of all."""
        qkv, residual = self.qkv_proj.of_norm(norm, x, residual)
        return self.mix(qkv, residual, wanted)

    def mix(self, qkv: Tensor, residual: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `forward` does with the projections, [T, width of all three]."""
        mixed = self._gated(qkv) if self.shape.is_gated else self.attention(qkv)
        if self.shape.value_scale != 1:
            mixed = mixed * self.shape.value_scale
        return self.o_proj(rows_of(mixed, wanted)), rows_of(residual, wanted)

    def _gated(self, qkv: Tensor) -> Tensor:
        heads, dim = self.spec.num_heads, self.spec.head_dim
        queries = qkv[:, : 2 * heads * dim].unflatten(-1, (heads, 2 * dim))
        mixed: Tensor = self.attention(torch.cat((queries[..., :dim].flatten(1), qkv[:, 2 * heads * dim :]), -1))
        return mixed * queries[..., dim:].flatten(1).sigmoid()

    @property
    def is_plain(self) -> bool:
        """Whether projections and attention are all there is."""
        return not self.shape.is_gated and self.shape.value_scale == 1


class GatedMLP(nn.Module):
    """down(activation(gate(x)) × up(x)). Returns this rank's part of the sum over ranks."""

    def __init__(
        self,
        setup: LayerSetup,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        parts = {"gate_proj": (intermediate_size, 1), "up_proj": (intermediate_size, 1)}
        self.size = intermediate_size
        """Of the whole model's."""
        self.gate_up_proj = GatedLinear(setup, hidden_size, parts, bias, activation)
        self.down_proj = RowLinear(setup, intermediate_size, 1, hidden_size, bias)

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(of norm(residual + x), residual + x)"""
        hidden, residual = self.gate_up_proj.of_norm(norm, x, residual)
        return self.down_proj(hidden), residual


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it, which it may take into its first product, and a residual around
    it."""

    def __init__(
        self,
        setup: LayerSetup,
        attention: nn.Module,
        mlp: nn.Module,
        hidden_size: int,
        eps: float,
        *,
        has_offset_norms: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norms)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norms)
        self.mlp = mlp
        # What is behind them, here or after the last layer, is a norm of the model's dtype that takes parts.
        if isinstance(attention, SelfAttention) and not has_offset_norms:
            attention.o_proj.send_parts()
        if isinstance(mlp, GatedMLP) and not has_offset_norms:
            mlp.down_proj.send_parts()

    def forward(self, x: Tensor, residual: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x is this rank's part of what the layer before adds to the residual stream. `wanted`, int64 [W]: the tokens
        that the result is of; None: all."""
        x, residual = self.self_attn(self.input_layernorm, x, residual, wanted)
        return self.mlp(self.post_attention_layernorm, x, residual)


class SandwichLayer(nn.Module):
    """Attention and MLP, each between two norms whose weights are stored as differences from 1 (Gemma 3).

    What it takes and adds to the residual stream is complete on every rank: the sum comes before the second norm.
    """

    def __init__(
        self, setup: LayerSetup, attention: SelfAttention, mlp: GatedMLP, hidden_size: int, eps: float
    ) -> None:
        super().__init__()
        self._tp = setup.tp
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm, self.pre_feedforward_layernorm = (
            RMSNorm(setup, hidden_size, eps, is_offset=True, takes_parts=False) for _ in range(3)
        )
        self.post_feedforward_layernorm = RMSNorm(setup, hidden_size, eps, is_offset=True)

    def forward(self, x: Tensor, residual: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`, but that x is complete."""
        x, residual = self.self_attn(self.input_layernorm, x, residual, wanted)
        x = self.post_attention_layernorm(self._tp.all_reduce(x))
        x, residual = self.mlp(self.pre_feedforward_layernorm, x, residual)
        return self.post_feedforward_layernorm(self._tp.all_reduce(x)), residual


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """x[rows]; rows int64 [W], or None for all of x."""
    return x if rows is None else x.index_select(0, rows)
