"""A decoder: embedding, layers, norm. Its layers are one operation where a kernel has it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.attention.context import current_context
from worker.kernels.decoder import DECODER, BoundWeights, DecoderKernel, DecoderLayerWeights, DecoderSpec
from worker.kernels.gqa import GqaCache
from worker.layers.blocks import DecoderLayer, GatedMLP, SelfAttention
from worker.layers.embedding import TokenEmbedding
from worker.layers.kept_states import KeptStates
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A layer whose parts are of the kinds that a kernel for whole decoders knows."""

    norms: tuple[RMSNorm, RMSNorm]
    attention: SelfAttention
    mlp: GatedMLP

    @classmethod
    def of(cls, layer: nn.Module) -> "PlainLayer | None":
        if not isinstance(layer, DecoderLayer):
            return None
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(attention, SelfAttention) or not isinstance(mlp, GatedMLP):
            return None
        if not attention.is_plain or mlp.gate_up_proj.activation != "silu":
            return None
        return cls((layer.input_layernorm, layer.post_attention_layernorm), attention, mlp)

    def spec(self, hidden_size: int) -> DecoderSpec:
        return DecoderSpec(hidden_size, self.mlp.size, self.attention.spec)

    def weights(self) -> DecoderLayerWeights:
        """Once they are packed."""
        return DecoderLayerWeights(
            attention_norm=self.norms[0].weight,
            qkv=self.attention.qkv_proj.packed,
            qk_norm=self.attention.attention.norm,
            rope=self.attention.attention.rope,
            output=self.attention.o_proj.packed,
            mlp_norm=self.norms[1].weight,
            gate_up=self.mlp.gate_up_proj.packed,
            down=self.mlp.down_proj.packed,
        )


class WholeDecoder:
    """All layers as one operation, on a rank that is alone and has a kernel for it."""

    def __init__(self, kernel: DecoderKernel, layers: Sequence[PlainLayer], norm: RMSNorm) -> None:
        self._kernel, self._layers, self._norm = kernel, layers, norm
        self._cache: GqaCache | None = None
        """Of the first layer, for which weights and caches are bound: a builder makes those of all layers anew."""
        self._bound: BoundWeights = None

    @classmethod
    def find(cls, setup: LayerSetup, layers: Sequence[nn.Module], norm: RMSNorm) -> "WholeDecoder | None":
        plain = [found for layer in layers if (found := PlainLayer.of(layer)) is not None]
        specs = {layer.spec(norm.weight.numel()) for layer in plain}
        if setup.tp.size > 1 or len(plain) != len(layers) or len(specs) != 1:
            return None
        kernel = setup.kernels.find(DECODER, specs.pop(), setup.dtype)
        return None if kernel is None else cls(kernel, plain, norm)

    def __call__(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        """[T, hidden], which may be overwritten → the last hidden states, normed: all, or [W, hidden] of `wanted`."""
        attention = self._layers[0].attention.attention
        if self._cache is not attention.cache:
            weights = [layer.weights() for layer in self._layers]
            caches = [layer.attention.attention.cache for layer in self._layers]
            self._bound = self._kernel.bind(weights, caches, self._norm.weight, self._norm.eps)
            self._cache = attention.cache
        return self._kernel(x, self._bound, current_context().metadata[attention.number], wanted)


class Decoder(nn.Module):
    """Embedding, layers, norm."""

    def __init__(
        self,
        setup: LayerSetup,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[nn.Module],
        eps: float,
        *,
        has_offset_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(setup, vocab_size, hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norm)
        self._whole = WholeDecoder.find(setup, layers, self.norm)
        self._kept: KeptStates | None = None

    def keep_states(self, kept: KeptStates) -> None:
        """Fill `kept` in each pass from now on."""
        self._kept = kept
        if self._whole is not None:
            logger.info("layers run one by one, not as one operation: drafts go on from states between them")
            self._whole = None

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] → what the first layer takes: x and the residual, [T, hidden] each."""
        return self.embed_tokens.with_residual(input_ids)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] → the last hidden state, [T, hidden], or [W, hidden] of the tokens that are wanted; complete on
        every rank. Of all others the last layer keeps keys and values, and computes nothing more: in a long prompt
        that is nearly all of its work."""
        wanted = current_context().wanted
        if self._whole is not None and current_context().cut is None:
            return self._whole(self.embed_tokens.forward(input_ids), wanted)
        x, residual = self.embed(input_ids)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x, residual = layer(*self.between(number, x, residual), wanted if number == last else None)
        return self.normed(x, residual)

    def between(self, place: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer behind so many others takes, where x and the residual are what these left: the same, or, if
        their sum is kept, nothing and the sum."""
        if self._kept is None or place not in self._kept.places:
            return x, residual
        stream = self.norm.add_norm(x, residual)[1]
        self._kept.put(place, stream)
        return torch.zeros_like(x), stream

    def normed(self, x: Tensor, residual: Tensor) -> Tensor:
        """The last hidden state, of what the last layer left."""
        hidden, stream = self.norm.add_norm(x, residual)
        if self._kept is not None:
            self._kept.put(len(self.layers), stream)
        return hidden


class SandwichDecoder(Decoder):
    """Of layers that take what is complete, as `SandwichLayer`s do; embeddings are scaled by the root of the hidden
    size."""

    def __init__(
        self,
        setup: LayerSetup,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[nn.Module],
        eps: float,
        *,
        has_offset_norm: bool = True,
    ) -> None:
        super().__init__(setup, vocab_size, hidden_size, layers, eps)
        self._tp = setup.tp
        # Rounded as the activations are, as `transformers` does.
        self._scale = torch.tensor(hidden_size**0.5, dtype=setup.dtype).item()
        self.norm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norm, takes_parts=False)

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = super().embed(input_ids)
        return self._tp.all_reduce(x) * self._scale, residual
