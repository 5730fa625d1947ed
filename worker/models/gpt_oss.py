"""GptOssForCausalLM: attention with sinks, a window in every second layer, and experts with biases in all layers."""

from dataclasses import replace

from worker.layers.blocks import DecoderLayer, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.experts import interleaved
from worker.layers.moe import MoeBlock
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import WeightTarget
from worker.loader.families.gpt_oss import GptOssConfig
from worker.models.dense import DecoderForCausalLM, attention_shape


class GptOssForCausalLM(DecoderForCausalLM):
    def __init__(self, config: GptOssConfig, setup: LayerSetup) -> None:
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        layers = [
            DecoderLayer(
                setup,
                SelfAttention(setup, replace(attention_shape(config, layer), has_sinks=True), rope),
                MoeBlock(setup, config.hidden_size, config.experts, interleaved),
                config.hidden_size,
                config.rms_norm_eps,
            )
            for layer in range(config.num_layers)
        ]
        decoder = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        super().__init__(config, setup, decoder)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoints call the gate a router."""
        targets = super().weight_targets()
        return {name.replace(".mlp.gate.", ".mlp.router."): target for name, target in targets.items()}
