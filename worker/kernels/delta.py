"""The operations of gated DeltaNet layers (Yang et al., arXiv 2412.06464): a causal convolution, and a state that is
corrected by each token.

Conventions are those of `operation`. K key heads of N numbers, H value heads of V numbers (H a multiple of K; each key
head, and its query, serves H / K value heads in a row), and a convolution over the last W tokens of each of
C = 2 × K × N + H × V channels: queries, keys, values.

A request has a group of state in every layer, which is zero before its first token: the last inputs of the convolution,
each where its position says, and of each value head the recurrent state, [N, V] in float32.

Where rows may have up to D drafts, their last tokens may turn out never to have been, and a state cannot be taken
back. So a **tentative** row, one of 2 to 1 + D tokens, leaves the recurrent state as it was before it, and its tokens
in a log, as far as the rule needs them; the next row of the request first makes up for those that it stands behind.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.kernels.operation import CacheKernel, Operation
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
    """Of activations, and of what is kept of them."""
    num_drafts: int = 0
    """D"""

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

    @property
    def num_inputs(self) -> int:
        """Inputs in a group: those that the convolution needs behind the first of 1 + D tokens, and the other D."""
        return self.width - 1 + self.num_drafts

    @property
    def most_tentative(self) -> int:
        """Tokens of a tentative row at most; 0: there are no such rows."""
        return 1 + self.num_drafts if self.num_drafts else 0

    @property
    def log_size(self) -> tuple[int, int]:
        """Tokens in a group's log, those of a row and those that it makes up for, and numbers of each."""
        return 2 * self.most_tentative, self.key_size + self.value_size + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's state of all groups. The last group is the spare one: its content is nobody's."""

    inputs: Tensor
    """[groups + 1, W − 1 + D, C]: that of position p is number p mod (W − 1 + D)."""
    recurrent: Tensor
    """float32 [groups + 1, H, N, V]"""
    log: Tensor
    """[groups + 1, 2 × (1 + D), K × N + H × V + 2 × H]: of position p, number p mod 2 × (1 + D): keys and values as the
    convolution leaves them, a, b. Without drafts [groups + 1, 0, …]."""

    @classmethod
    def zeros(cls, spec: DeltaSpec, num_groups: int, device: torch.device) -> "DeltaState":
        """`num_groups`: with the spare one."""
        return cls(
            torch.zeros(num_groups, spec.num_inputs, spec.num_channels, dtype=spec.dtype, device=device),
            torch.zeros(num_groups, spec.num_value_heads, spec.key_dim, spec.value_dim, device=device),
            torch.zeros(num_groups, *spec.log_size, dtype=spec.dtype, device=device),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inputs, self.recurrent, self.log) if self.log.numel() else (self.inputs, self.recurrent)


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


class DeltaKernel(CacheKernel, Protocol):
    """In each step a group belongs to one row, but for the spare one: its rows and state are undefined."""

    def prepare(self, step: Step, buffers: StepBuffers, lag: Tensor | None) -> DeltaMetadata:
        """Work out, once a step, what all layers share. `lag`, int64 [R]: tokens right before each row's first that are
        in its log and not in its recurrent state, at most 1 + D; None where D is 0."""

    def convolve(self, x: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: DeltaMetadata) -> Tensor:
        """silu of the convolution of each row's inputs, those in its state before them; which takes them in, **in
        place**. x [T, C] → [T, C]."""

    def update(
        self, qkv: Tensor, a: Tensor, b: Tensor, parameters: DeltaParameters, state: DeltaState, metadata: DeltaMetadata
    ) -> Tensor:
        """The gated delta rule: each token's state, **in place** but for tentative rows, and what its query finds
        there. qkv [T, C] as `convolve` returns it, a and b [T, H] → [T, H, V].

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
