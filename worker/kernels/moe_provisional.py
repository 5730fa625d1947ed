from dataclasses import dataclass
from torch import Tensor


@dataclass(frozen=True)
class ExpertsSpec:
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    first_expert: int = 0
    has_bias: bool = False
    is_clamped: bool = False
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class ExpertWeights:
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class RouteSpec:
    num_experts: int
    top_k: int
    is_sigmoid: bool = False
    is_normalised: bool = True
    num_groups: int = 1
    num_top_groups: int = 1
    scale: float = 1.0
