"""`MoeConfig`: a decoder with experts in place of most gated MLPs."""

from dataclasses import dataclass

from worker.loader.config import ModelConfig
from worker.loader.experts import ExpertsConfig
from worker.loader.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ModelConfig):
    experts: ExpertsConfig
    dense_layers: frozenset[int] = frozenset()
    """Those with a gated MLP in place of experts."""
    has_qk_norm: bool = False
    """Each query and key head is normed before it is rotated."""


def qwen_dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Those that the file names, and those between every so many with experts. Raises ModelConfigError."""
    step, named = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers", [])
    return frozenset(i for i in range(num_layers) if i in named or (i + 1) % step)
