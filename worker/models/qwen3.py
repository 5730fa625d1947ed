"""Qwen3ForCausalLM: the dense models, which norm each query and key head before it is rotated."""

from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.models.dense import DenseForCausalLM


class Qwen3ForCausalLM(DenseForCausalLM):
    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        super().__init__(config, setup, has_qk_norm=True)
