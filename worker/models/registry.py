"""Models by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from worker.kernels.interface import KernelBackend
from worker.layers.attention import PagedAttention
from worker.layers.parallel import TensorParallel
from worker.loader.checkpoint import WeightTarget
from worker.loader.config import ModelConfig
from worker.loader.errors import UnknownArchitectureError
from worker.models.llama import LlamaForCausalLM


class CausalLM(Protocol):
    """A decoder-only language model over the paged cache."""

    ignored_weights: frozenset[str]
    """Checkpoint names that may be there and are not read."""

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoint name → how to load it, for every tensor the model needs."""

    def attention_layers(self) -> list[PagedAttention]:
        """In the order of the layers."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [T] each → last hidden state [T, hidden]. Runs inside a forward context."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] → [R, vocabulary]."""


_MODELS: dict[str, Callable[[ModelConfig, KernelBackend, TensorParallel], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def create_model(config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> CausalLM:
    """The model with uninitialised weights on the kernels' device. Raises UnknownArchitectureError."""
    if config.architecture not in _MODELS:
        known = ", ".join(sorted(_MODELS))
        raise UnknownArchitectureError(f"architecture {config.architecture!r} is not supported; known: {known}")
    return _MODELS[config.architecture](config, kernels, parallel)
