"""The operations of gated DeltaNet layers (Yang et al., arXiv 2412.06464): a causal convolution, and a state that is
corrected by each token.

Conventions are those of `interface`. K key heads of N numbers, H value heads of V numbers (H a multiple of K; each key
head, and its query, serves H / K value heads in a row), and a convolution over the last W tokens of each of
C = 2 × K × N + H × V channels: queries, keys, values.

A request has a group of state in every layer, which is zero before its first token: the last W − 1 inputs of the
convolution, and of each value head the recurrent state, [N, V] in float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.kernels.interface import Operation
from worker.kernels.step import Step, StepBuffers


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """One kind of layer, on this rank."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """N"""
    value_dim: int
    """V"""
    width: int
    """W"""
    dtype: torch.dtype
    """Of the convolution's state."""

    @property
    def key_size(self) -> int:
        """Of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """C"""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's state of all groups. The last group is the spare one: its content is nobody's."""

    inputs: Tensor
    """[groups + 1, W − 1, C], the oldest first."""
    recurrent: Tensor
    """float32 [groups + 1, H, N, V]"""


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """Of one layer, float32 but for the last."""

    log_decay: Tensor
    """[H]: A, of which a token's decay is exp(−exp(A) × softplus(a + bias))."""
    bias: Tensor
    """[H]"""
    taps: Tensor
    """[C, W]: what each channel's last W inputs count, the oldest first."""


DeltaMetadata = Any
"""What `prepare` made of a step. Valid for that step, for the kernel that made it."""


class DeltaKernel(Protocol):
    """In each step a group belongs to one row, but for the spare one: its rows and state are undefined."""

    def prepare(self, step: Step, buffers: StepBuffers) -> DeltaMetadata:
        """Work out, once a step, what all layers share."""

    def can_capture(self) -> bool:
        """Whether what `prepare` makes of uniform rows, and the layers do with it, serves any step of as many."""

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        """See `CacheBuilder.all_steps`."""

    def convolve(self, x: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: DeltaMetadata) -> Tensor:
        """silu of the convolution of each row's inputs, those in its state before them; which then are the last ones,
        **in place**. x [T, C] → [T, C]."""

    def update(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: DeltaMetadata
    ) -> Tensor:
        """The gated delta rule: each token's state, **in place**, and what its query finds there. qkv [T, C] as
        `convolve` returns it, a and b [T, H] → [T, H, V].

        Queries and keys are divided by sqrt(sum of squares + 1e-6), queries by sqrt(N), too. Then a token's state is
        S' = S × decay, S = S' + key × sigmoid(b) × (value − keyᵀ S'), and its output queryᵀ S.
        """


@dataclass(frozen=True, slots=True)
class GatedNormSpec:
    size: int


class GatedNormKernel(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of x, in its dtype, × silu(gate): x and gate [T, H, N], weight [N] → [T, H × N]."""


DELTA: Operation[DeltaSpec, DeltaKernel] = Operation("gated_delta")
GATED_NORM: Operation[GatedNormSpec, GatedNormKernel] = Operation("gated_norm")
