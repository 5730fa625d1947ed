"""Norms, gated activations, embedding, rotary tables. Conventions are those of `operation`."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from worker.kernels.operation import Operation
from worker.parallel.group import Group

Activation = Literal["silu", "gelu_tanh"]
"""gelu_tanh: GELU by its approximation with the hyperbolic tangent (arXiv 1606.08415)."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    size: int
    has_float32_weight: bool = False
    """Whatever the dtype: of norms whose checkpoints hold the weight's difference from 1."""


class RmsNormKernel(Protocol):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x², last) + eps) × weight; x [..., N], weight [N]. The mean is taken in float32."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        """residual += sum of x over the group's ranks, **in place**; returns (norm(residual), residual). May overwrite
        x."""


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    size: int
    kind: Activation = "silu"


class GatedActivationKernel(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, 2N] holds gate and up side by side: activation(gate) × up, [T, N]. May overwrite x."""


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    hidden_size: int


class EmbeddingKernel(Protocol):
    def __call__(self, ids: Tensor, table: Tensor, first: int | None = None, residual: Tensor | None = None) -> Tensor:
        """table[ids]; ids int64 [T], table [V, N]. With `first` the table is a shard, whose first row is that token's:
        zeros where the shard does not have the token. `residual`, like the result, becomes zeros."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding, neox pairing (i with i + rotary_dim / 2)."""

    cos: Tensor
    """(c, c) of each position, [positions, rotary_dim]."""
    sin: Tensor
    """(−s, s)"""


RMS_NORM: Operation[NormSpec, RmsNormKernel] = Operation("rms_norm")
GATED_ACTIVATION: Operation[ActivationSpec, GatedActivationKernel] = Operation("gated_activation")
EMBEDDING: Operation[EmbeddingSpec, EmbeddingKernel] = Operation("embedding")
