"""Models by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable

from worker.kernels.interface import KernelBackend
from worker.layers.parallel import TensorParallel
from worker.loader.config import ModelConfig
from worker.loader.errors import UnknownArchitectureError
from worker.models.base import CausalLM
from worker.models.llama import LlamaForCausalLM

_MODELS: dict[str, Callable[[ModelConfig, KernelBackend, TensorParallel], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def create_model(config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> CausalLM:
    """The model with uninitialised weights on the kernels' device. Raises UnknownArchitectureError."""
    if config.architecture not in _MODELS:
        known = ", ".join(sorted(_MODELS))
        raise UnknownArchitectureError(f"architecture {config.architecture!r} is not supported; known: {known}")
    return _MODELS[config.architecture](config, kernels, parallel)
