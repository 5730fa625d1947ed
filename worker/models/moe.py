"""Qwen3MoeForCausalLM and what else has attention with K and V per head, and experts in place of most MLPs."""

from torch import nn

from worker.layers.blocks import DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.experts import ExpertsLayout, apart
from worker.layers.moe import MoeBlock
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.families.moe import MoeConfig
from worker.models.dense import DecoderForCausalLM, attention_shape


class MoeForCausalLM(DecoderForCausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: MoeConfig, setup: LayerSetup, layout: ExpertsLayout = apart) -> None:
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        layers = [
            DecoderLayer(
                setup,
                SelfAttention(setup, attention_shape(config, layer, has_qk_norm=config.has_qk_norm), rope),
                moe_or_mlp(config, setup, layer, layout),
                config.hidden_size,
                config.rms_norm_eps,
            )
            for layer in range(config.num_layers)
        ]
        decoder = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        super().__init__(config, setup, decoder)


def moe_or_mlp(config: MoeConfig, setup: LayerSetup, layer: int, layout: ExpertsLayout = apart) -> nn.Module:
    """What stands behind that layer's attention."""
    if config.experts is None or layer in config.dense_layers:
        return GatedMLP(setup, config.hidden_size, config.intermediate_size)
    return MoeBlock(setup, config.hidden_size, config.experts, layout)
