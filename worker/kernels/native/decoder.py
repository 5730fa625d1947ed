"""All layers of a decoder in one call: threads meet inside of it, some 180 times a step, and never in Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.decoder import DecoderKernel, DecoderLayerWeights, DecoderSpec
from worker.kernels.gqa import GqaCache
from worker.kernels.native.gqa import StepMetadata, attention_model, point_at_attention, supports_gqa
from worker.kernels.native.library import Layer, Model, engine, pointer

PANELS = 32
"""Outputs of the widest panel: a gate and its value lie in panels of the same number."""


@dataclass(frozen=True, slots=True)
class BoundDecoder:
    model: Model
    weights: Any
    """What the model points into."""


class NativeDecoder(DecoderKernel):
    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._engine = engine()

    def bind(
        self, layers: Sequence[DecoderLayerWeights], caches: Sequence[GqaCache], norm: Tensor, eps: float
    ) -> BoundDecoder:
        views = (Layer * len(layers))()
        for view, layer, cache in zip(views, layers, caches, strict=True):
            view.qkv, view.output = layer.qkv.view, layer.output.view
            view.gate_up, view.down = layer.gate_up.view, layer.down.view
            view.attention_norm, view.mlp_norm = pointer(layer.attention_norm), pointer(layer.mlp_norm)
            point_at_attention(view, layer.qk_norm, layer.rope, cache)
        model = attention_model(self._spec.attention, layers[0].qk_norm, caches[0])
        model.num_layers, model.layers = len(layers), views
        model.hidden_size, model.intermediate_size = self._spec.hidden_size, self._spec.intermediate_size
        model.norm, model.eps = pointer(norm), eps
        return BoundDecoder(model, (layers, caches, norm, views))

    def __call__(self, x: Tensor, bound: BoundDecoder, metadata: StepMetadata, wanted: Tensor | None = None) -> Tensor:
        out = torch.empty_like(x) if wanted is None else x.new_empty(wanted.shape[0], x.shape[1])
        bound.model.block_size = metadata.block_size
        self._engine.decode(bound.model, metadata.view, wanted, x, out)
        return out


def supports_decoder(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return supports_gqa(spec.attention, device, dtype) and spec.intermediate_size % PANELS == 0
