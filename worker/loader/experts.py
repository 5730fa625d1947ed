"""`ExpertsConfig`: what a mixture of experts is. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    num_experts: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Of one expert."""
    is_sigmoid: bool = False
    """Scores are sigmoids of the router's logits; else their softmax."""
    is_normalised: bool = True
    """A token's weights are shares of the chosen scores' sum; else the scores."""
    has_correction: bool = False
    """A number of each expert is added to its score for the choice alone."""
    num_groups: int = 1
    """Of experts, of which the best ones' are chosen from."""
    num_top_groups: int = 1
    scale: float = 1.0
    """Of the weights, at last."""
    has_float32_router: bool = False
    """Else the router's product is in the model's dtype."""
    shared_size: int = 0
    """Intermediate size of what every token goes to, all shared experts together."""
    has_shared_gate: bool = False
    """The shared experts' sum is multiplied by the sigmoid of a product of its own."""
    has_bias: bool = False
    """Of the router and the experts."""
    is_gelu: bool = False
    """The experts' activation is GELU (by tanh); else SiLU."""
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    """See `ClampedSwiglu`; None: the activation is not clamped."""
