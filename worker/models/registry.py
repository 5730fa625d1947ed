"""Models by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable

from worker.kernels.interface import KernelBackend
from worker.layers.parallel import TensorParallel
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM
from worker.models.llama import LlamaForCausalLM

MODELS: dict[str, Callable[[ModelConfig, KernelBackend, TensorParallel], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}
"""One for each architecture that the loader reads configurations of."""


def create_model(config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> CausalLM:
    """The model with uninitialised weights on the kernels' device."""
    return MODELS[config.architecture](config, kernels, parallel)
