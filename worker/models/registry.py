"""Models by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable

from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM
from worker.models.llama import LlamaForCausalLM

MODELS: dict[str, Callable[[ModelConfig, LayerSetup], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}
"""One for each architecture that the loader reads configurations of."""


def create_model(config: ModelConfig, setup: LayerSetup) -> CausalLM:
    """The model with uninitialised weights on the kernels' device."""
    return MODELS[config.architecture](config, setup)
