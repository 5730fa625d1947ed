"""MixtralForCausalLM: a Mistral with experts, whose checkpoints have names of their own."""

from functools import partial

from worker.layers.experts import apart
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import WeightTarget
from worker.loader.families.moe import MoeConfig
from worker.models.moe import MoeForCausalLM

EXPERT_NAMES = ("w1", "w3", "w2")
"""Gate, up and down."""


class MixtralForCausalLM(MoeForCausalLM):
    def __init__(self, config: MoeConfig, setup: LayerSetup) -> None:
        super().__init__(config, setup, partial(apart, names=EXPERT_NAMES))

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = super().weight_targets()
        return {name.replace(".mlp.", ".block_sparse_moe."): target for name, target in targets.items()}
