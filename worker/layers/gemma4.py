"""Gemma 4's decoder: layers between two norms each, which may be told of their token beside the hidden state, and whose
result is scaled."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.attention.context import current_context
from worker.layers.blocks import GatedMLP, rows_of
from worker.layers.decoder import SandwichDecoder
from worker.layers.embedding import TokenEmbedding
from worker.layers.experts import stacked
from worker.layers.linear import MergedColumnLinear
from worker.layers.moe import MoeBlock
from worker.layers.norm import RMSNorm
from worker.layers.scales import ScaledRouter, Scales
from worker.layers.setup import LayerSetup
from worker.layers.shared_kv import OwnKvAttention, SharedKv, SharedKvAttention
from worker.loader.experts import ExpertsConfig


class Gemma4Layer(nn.Module):
    """What it takes and adds to the residual stream is complete on every rank, as of a `SandwichLayer`."""

    def __init__(
        self,
        setup: LayerSetup,
        attention: OwnKvAttention | SharedKvAttention,
        mlp: GatedMLP,
        hidden_size: int,
        per_layer_size: int,
        eps: float,
    ) -> None:
        """`per_layer_size`: see `Gemma4Decoder`."""
        super().__init__()
        self._tp, self._is_told = setup.tp, per_layer_size > 0
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.pre_feedforward_layernorm = (
            RMSNorm(setup, hidden_size, eps, takes_parts=False) for _ in range(2)
        )
        self.post_attention_layernorm, self.post_feedforward_layernorm = (
            RMSNorm(setup, hidden_size, eps) for _ in range(2)
        )
        self.layer_scalar = Scales(setup, 1, setup.dtype)
        if self._is_told:
            # Too small to be worth a sum over ranks: each has all of both.
            self.gate = MergedColumnLinear(setup, hidden_size, {"per_layer_input_gate": (1, per_layer_size)})
            self.projection = MergedColumnLinear(setup, per_layer_size, {"per_layer_projection": (1, hidden_size)})
            self.post_per_layer_input_norm = RMSNorm(setup, hidden_size, eps)

    def forward(
        self, x: Tensor, residual: Tensor, told: Tensor | None, shared: SharedKv, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `SandwichLayer.forward`; told: [T, per_layer_size] of all tokens."""
        x, residual = self.self_attn.attend(self.input_layernorm, x, residual, shared, wanted)
        x = self.post_attention_layernorm(self._tp.all_reduce(x))
        x, residual = self._feed_forward(x, residual)
        x = self.post_feedforward_layernorm(x)
        if told is not None:
            residual = residual.add_(x)
            gate = functional.gelu(self.gate(residual), approximate="tanh")
            x = self.post_per_layer_input_norm(self.projection(gate.mul_(rows_of(told, wanted))))
        return x.mul_(self.layer_scalar.numbers), residual.mul_(self.layer_scalar.numbers)

    def _feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(of residual + x, complete on every rank, residual + x)"""
        x, residual = self.mlp(self.pre_feedforward_layernorm, x, residual)
        return self._tp.all_reduce(x), residual


class Gemma4ExpertsLayer(Gemma4Layer):
    """Experts beside the MLP, each with norms of its own."""

    def __init__(
        self,
        setup: LayerSetup,
        attention: OwnKvAttention | SharedKvAttention,
        mlp: GatedMLP,
        hidden_size: int,
        per_layer_size: int,
        eps: float,
        experts: ExpertsConfig,
    ) -> None:
        super().__init__(setup, attention, mlp, hidden_size, per_layer_size, eps)
        self.moe = MoeBlock(setup, hidden_size, experts, stacked, ScaledRouter(setup, hidden_size, experts, eps))
        self.pre_feedforward_layernorm_2 = RMSNorm(setup, hidden_size, eps, takes_parts=False)
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = (
            RMSNorm(setup, hidden_size, eps) for _ in range(2)
        )

    def _feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        routed, residual = self.moe(self.pre_feedforward_layernorm_2, x, residual)
        routed = self.post_feedforward_layernorm_2(self._tp.all_reduce(routed))
        hidden = self.pre_feedforward_layernorm(residual)
        dense = self._tp.all_reduce(self.mlp.down_proj(self.mlp.gate_up_proj(hidden)))
        return self.post_feedforward_layernorm_1(dense).add_(routed), residual


class Gemma4Decoder(SandwichDecoder):
    """Where `per_layer_size` is not 0, each layer is told so many numbers of each token: the sum of what an embedding
    has of it and of a product of the first hidden state."""

    def __init__(
        self,
        setup: LayerSetup,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[Gemma4Layer],
        eps: float,
        per_layer_size: int,
        per_layer_vocab_size: int,
    ) -> None:
        super().__init__(setup, vocab_size, hidden_size, layers, eps, has_offset_norm=False)
        self._per_layer_size = per_layer_size
        if per_layer_size:
            width = len(layers) * per_layer_size
            self.embed_tokens_per_layer = TokenEmbedding(setup, per_layer_vocab_size, width)
            self.projection = MergedColumnLinear(setup, hidden_size, {"per_layer_model_projection": (1, width)})
            self.per_layer_projection_norm = RMSNorm(setup, per_layer_size, eps)
            self._per_layer_scale = torch.tensor(per_layer_size**0.5, dtype=setup.dtype).item()
            self._projection_scale = hidden_size**-0.5

    def forward(self, input_ids: Tensor) -> Tensor:
        x, residual = self.embed(input_ids)
        told: Sequence[Tensor | None] = [None] * len(self.layers)
        if self._per_layer_size:
            told = self._told(input_ids, x).unbind(1)
        shared, last = SharedKv(), len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            wanted = current_context().wanted if number == last else None
            x, residual = layer(*self.between(number, x, residual), told[number], shared, wanted)
        return self.normed(x, residual)

    def _told(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """[T, layers, per_layer_size]"""
        shape = (len(x), len(self.layers), self._per_layer_size)
        of_token = self._tp.all_reduce(self.embed_tokens_per_layer(input_ids)) * self._per_layer_scale
        of_state = self.projection(x) * self._projection_scale
        of_state = self.per_layer_projection_norm(of_state.view(-1, self._per_layer_size))
        return (of_state.view(shape) + of_token.view(shape)) * 2**-0.5
