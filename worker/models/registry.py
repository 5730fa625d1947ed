"""Models by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable

from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM
from worker.models.llama import LlamaForCausalLM
from worker.models.mistral import MistralForCausalLM
from worker.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, Callable[[ModelConfig, LayerSetup], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
"""One for each architecture that the loader reads configurations of."""


def create_model(config: ModelConfig, setup: LayerSetup) -> CausalLM:
    """The model with uninitialised weights on the kernels' device."""
    return MODELS[config.architecture](config, setup)
