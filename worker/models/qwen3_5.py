"""Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM: Qwen3-Next with projections stored by kind."""

from worker.layers.setup import LayerSetup
from worker.loader.families.qwen3_next import HybridConfig
from worker.models.qwen3_next import HybridForCausalLM


class Qwen35ForCausalLM(HybridForCausalLM):
    def __init__(self, config: HybridConfig, setup: LayerSetup) -> None:
        super().__init__(config, setup, "by kind")
