"""Attention whose keys and values several layers see (Gemma 4, after arXiv 2405.12981): some make them, others have
queries alone."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import QkNorm
from worker.layers.attention import SharedAttention
from worker.layers.blocks import AttentionShape, SelfAttention, rows_of
from worker.layers.linear import MergedColumnLinear, RowLinear
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup

SharedKv = dict[int, Tensor]
"""Of one forward pass: number of a layer → its keys, not normed, and values, [T, K × (D + value_dim)]."""


class OwnKvAttention(SelfAttention):
    """Value heads are normed, too, with no weight."""

    def __init__(self, setup: LayerSetup, shape: AttentionShape, rope: RopeTable, eps: float, number: int) -> None:
        """`number`: of the layer."""
        super().__init__(setup, shape, rope)
        self.number, self._eps = number, eps
        self.is_shared = False
        """Whether there is another layer that sees its keys."""

    def attend(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, shared: SharedKv, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `forward`; leaves in `shared` what others see."""
        qkv, residual = self.qkv_proj.of_norm(norm, x, residual)
        spec = self.spec
        values = qkv[:, -spec.num_kv_heads * spec.value_dim :].unflatten(1, (-1, spec.value_dim))
        values.copy_(functional.rms_norm(values, (spec.value_dim,), eps=self._eps))
        if self.is_shared:
            shared[self.number] = qkv[:, spec.num_heads * spec.head_dim :].clone()
        return self.mix(qkv, residual, wanted)


class SharedKvAttention(nn.Module):
    """Queries over the keys and values of another layer."""

    def __init__(self, setup: LayerSetup, shape: AttentionShape, source: OwnKvAttention, eps: float) -> None:
        super().__init__()
        source.is_shared = True
        self._source_number = source.number
        heads, dim = shape.num_heads, shape.head_dim
        self.query_proj = MergedColumnLinear(setup, shape.hidden_size, {"q_proj": (heads, dim)}, shape.bias)
        self.o_proj = RowLinear(setup, heads, shape.v_head_dim or dim, shape.hidden_size, shape.output_bias)
        self.q_norm = RMSNorm(setup, dim, eps)
        self.attention = SharedAttention(source.attention, QkNorm(self.q_norm.weight, source.k_norm.weight, eps))

    def attend(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, shared: SharedKv, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `OwnKvAttention.attend`."""
        queries, residual = self.query_proj.of_norm(norm, x, residual)
        mixed = self.attention(torch.cat((queries, shared[self._source_number]), 1))
        return self.o_proj(rows_of(mixed, wanted)), rows_of(residual, wanted)
