"""MiMoV2FlashForCausalLM: layers with a window and sinks, and some that see everything; the two kinds have heads and
angles of their own, values are narrower than keys, and most layers have experts."""

from dataclasses import replace

from worker.kernels.elementwise import RopeTable
from worker.layers.blocks import DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import WeightTarget
from worker.loader.config import ModelConfig
from worker.loader.families.mimo_v2 import MimoConfig
from worker.models.dense import DecoderForCausalLM, attention_shape
from worker.models.moe import moe_or_mlp
from worker.models.mtp import MtpLayer


class MimoV2FlashForCausalLM(DecoderForCausalLM):
    def __init__(self, config: MimoConfig, setup: LayerSetup) -> None:
        full, local = (_rope(config, kind, setup) for kind in (config, config.local))
        layers = [
            DecoderLayer(
                setup,
                _attention(config, setup, local if is_local else full, is_local=is_local),
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


def mimo_mtp_layer(config: MimoConfig, setup: LayerSetup) -> MtpLayer:
    """With a window, and without experts."""
    attention = _attention(config, setup, _rope(config, config.local, setup), is_local=True)
    mlp = GatedMLP(setup, config.hidden_size, config.intermediate_size)
    return MtpLayer(setup, attention, mlp, config.hidden_size, config.rms_norm_eps)


def _attention(config: MimoConfig, setup: LayerSetup, rope: RopeTable, *, is_local: bool) -> SelfAttention:
    shape = replace(
        attention_shape(config.local if is_local else config, 0),
        v_head_dim=config.local_v_head_dim if is_local else config.v_head_dim,
        window=config.local_window if is_local else None,
        has_sinks=is_local,
        value_scale=config.value_scale,
    )
    return SelfAttention(setup, shape, rope)


def _rope(config: MimoConfig, kind: ModelConfig, setup: LayerSetup) -> RopeTable:
    return rope_table(setup, kind.rope, kind.head_dim, config.max_model_len)
