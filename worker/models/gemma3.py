"""Gemma3ForCausalLM: Gemma 3 of text alone. Most layers have a window, and angles of their own."""

from dataclasses import replace

from worker.layers.blocks import GatedMLP, SandwichLayer, SelfAttention
from worker.layers.decoder import SandwichDecoder
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.families.gemma3 import Gemma3Config
from worker.models.dense import DecoderForCausalLM, attention_shape


class Gemma3ForCausalLM(DecoderForCausalLM):
    def __init__(self, config: Gemma3Config, setup: LayerSetup) -> None:
        full, local = (
            rope_table(setup, rope, config.head_dim, config.max_model_len) for rope in (config.rope, config.local_rope)
        )
        layers = []
        for layer, is_local in enumerate(config.is_local):
            shape = replace(
                attention_shape(config, layer, has_qk_norm=True),
                has_offset_norms=True,
                scale=config.query_scalar**-0.5,
            )
            attention = SelfAttention(setup, shape, local if is_local else full)
            mlp = GatedMLP(setup, config.hidden_size, config.intermediate_size, activation="gelu_tanh")
            layers.append(SandwichLayer(setup, attention, mlp, config.hidden_size, config.rms_norm_eps))
        decoder = SandwichDecoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        super().__init__(config, setup, decoder, config.logit_soft_cap)
