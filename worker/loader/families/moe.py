"""`MoeConfig`: a decoder with experts in place of most gated MLPs."""

from dataclasses import dataclass

from worker.loader.config import ModelConfig
from worker.loader.experts import ExpertsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ModelConfig):
    experts: ExpertsConfig
    dense_layers: frozenset[int] = frozenset()
    """Those with a gated MLP in place of experts."""
    has_qk_norm: bool = False
    """Each query and key head is normed before it is rotated."""
