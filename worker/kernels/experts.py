"""The operations of a mixture of experts: which experts a token goes to, and what these make of it.

Conventions are those of `operation`. E experts, k of them for each token, H the hidden size, I an expert's inner size.
An expert's number that is not among this rank's adds nothing: other ranks have it, or nobody does (`NO_EXPERT`).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from worker.kernels.elementwise import Activation
from worker.kernels.operation import Operation
from worker.kernels.weights import Dense, Weight

# --- routing


@dataclass(frozen=True, slots=True)
class RouteSpec:
    num_experts: int
    """Of the whole model."""
    top_k: int
    is_sigmoid: bool = False
    """Scores are sigmoids of the logits; else their softmax."""
    is_normalised: bool = True
    """Weights are shares of the chosen scores' sum; else the scores. Of softmax, they are then the softmax of the
    chosen logits."""
    num_groups: int = 1
    """Equal parts of the experts, in order; each has the sum of its two best scores."""
    num_top_groups: int = 1
    """Experts of the best so many groups can be chosen."""
    scale: float = 1.0
    """Of the weights, at last."""


class RouteKernel(Protocol):
    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, k], expert numbers int32 or int64 [T, k]) of logits [T, E], of any dtype and
        computed with in float32.

        `bias` float32 [E] is added to the scores for the choice, of groups and of experts, and not to the weights
        (DeepSeek-V3, arXiv 2412.19437). The k of a token differ, whatever its logits are.
        """

    def of_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """(logits float32 [T, E], the RMS norm of residual + x, residual + x), all new: the logits are the norm's
        product with `router` [E, H], which has a dtype of its own, + `bias` [E] of the same. None where the kernel
        cannot do that in one pass, which may depend on the number of tokens."""
        return None


# --- experts


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gate × sigmoid(alpha × gate) × (up + 1) of a gate of at most `limit`, and an up within ± `limit` (GPT-OSS)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Of this rank."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    first_expert: int = 0
    """The number of the first one."""
    activation: Activation = "silu"
    clamped: ClampedSwiglu | None = None
    """In place of activation(gate) × up."""
    has_bias: bool = False
    kind: type[Weight] = Dense
    """Of both weights."""
    num_elsewhere: int = 0
    """Experts of other ranks, which tokens have as often as these."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Of all experts of a rank: weights whose tensors have a dimension in front, the expert's."""

    gate_up: Weight
    """Dense: [E, 2 I, H], an expert's gate before its up; bias [E, 2 I]."""
    down: Weight
    """Dense: [E, H, I]; bias [E, H]."""


PackedExperts = Any
"""What `pack` made of the weights. Only the kernel that made it can read it."""


class ExpertsKernel(Protocol):
    def pack(self, weights: ExpertWeights) -> PackedExperts:
        """Bring weights into the layout that the products read; the caller drops its copies."""

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: PackedExperts, out: Tensor | None = None
    ) -> Tensor:
        """The sum over a token's experts of weight × down(activation(gate(x)) × up(x)): [T, H], into `out` where given.

        x [T, H]; weights float32 [T, k] and ids, int32 or int64 [T, k], as a `RouteKernel` gives them. Tokens of whom
        this rank has no expert get zeros. On a GPU it waits for nothing, whatever the ids are, and can be captured.
        """


ROUTE_EXPERTS: Operation[RouteSpec, RouteKernel] = Operation("route_experts")
EXPERTS: Operation[ExpertsSpec, ExpertsKernel] = Operation("experts")
