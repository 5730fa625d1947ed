"""A whole decoder as one operation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GqaCache, GqaMetadata, GqaSpec, QkNorm
from worker.kernels.linear import PackedWeight
from worker.kernels.operation import Operation


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Equal layers of attention and a gated MLP with SiLU, each behind a norm and beside the residual; one rank."""

    hidden_size: int
    intermediate_size: int
    attention: GqaSpec


@dataclass(frozen=True, slots=True)
class DecoderLayerWeights:
    """Weights are as the LINEAR kernels of the decoder's own backend packed them."""

    attention_norm: Tensor
    qkv: PackedWeight
    qk_norm: QkNorm | None
    rope: RopeTable | None
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight


BoundWeights = Any
"""What `bind` made of a decoder's weights and caches, which it keeps."""


class DecoderKernel(Protocol):
    """All layers as one operation. Its GQA is that of its own backend."""

    def bind(
        self, layers: Sequence[DecoderLayerWeights], caches: Sequence[GqaCache], norm: Tensor, eps: float
    ) -> BoundWeights:
        """Once for weights and caches that stay where they are. `norm` [hidden]: the last one; `eps` of all of them."""

    def __call__(self, x: Tensor, bound: BoundWeights, metadata: GqaMetadata, wanted: Tensor | None = None) -> Tensor:
        """x [T, hidden], which may be overwritten → the last hidden states, normed, [T, hidden]; or [W, hidden] of the
        tokens that `wanted`, int64 [W], names: the same numbers."""


DECODER: Operation[DecoderSpec, DecoderKernel] = Operation("decoder")
