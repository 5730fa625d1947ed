"""MiMoV2FlashForCausalLM: layers with a window and sinks, and some that see everything; the two kinds have heads and
angles of their own, values are narrower than keys, and most layers have experts."""

from dataclasses import replace

from worker.layers.blocks import AttentionShape, DecoderLayer, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import WeightTarget
from worker.loader.families.mimo_v2 import MimoConfig
from worker.models.dense import DecoderForCausalLM, attention_shape
from worker.models.moe import moe_or_mlp


class MimoV2FlashForCausalLM(DecoderForCausalLM):
    def __init__(self, config: MimoConfig, setup: LayerSetup) -> None:
        full, local = (
            rope_table(setup, kind.rope, kind.head_dim, config.max_model_len) for kind in (config, config.local)
        )
        layers = [
            DecoderLayer(
                setup,
                SelfAttention(setup, _attention_shape(config, layer), local if is_local else full),
                moe_or_mlp(config, setup, layer),
                config.hidden_size,
                config.rms_norm_eps,
            )
            for layer, is_local in enumerate(config.is_local)
        ]
        decoder = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        super().__init__(config, setup, decoder)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoints call sinks a bias."""
        targets = super().weight_targets()
        return {name.replace(".sinks", ".attention_sink_bias"): target for name, target in targets.items()}


def _attention_shape(config: MimoConfig, layer: int) -> AttentionShape:
    is_local = config.is_local[layer]
    return replace(
        attention_shape(config.local if is_local else config, layer),
        v_head_dim=config.local_v_head_dim if is_local else config.v_head_dim,
        window=config.window(layer),
        has_sinks=is_local,
        value_scale=config.value_scale,
    )
