"""Qwen3MoeForCausalLM and what else has attention with K and V per head, and experts in place of most MLPs."""

from torch import nn

from worker.kernels.elementwise import RopeTable
from worker.layers.blocks import DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.experts import ExpertsLayout, apart
from worker.layers.moe import MoeBlock
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.families.moe import MoeConfig
from worker.models.dense import DecoderForCausalLM, attention_shape
from worker.models.mtp import MtpLayer


class MoeForCausalLM(DecoderForCausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: MoeConfig, setup: LayerSetup, layout: ExpertsLayout = apart) -> None:
        rope = _rope(config, setup)
        layers = [
            DecoderLayer(
                setup, *_layer_parts(config, setup, rope, number, layout), config.hidden_size, config.rms_norm_eps
            )
            for number in range(config.num_layers)
        ]
        decoder = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        super().__init__(config, setup, decoder)


def moe_mtp_layer(config: MoeConfig, setup: LayerSetup) -> MtpLayer:
    """That behind the model's last one."""
    attention, mlp = _layer_parts(config, setup, _rope(config, setup), config.num_layers, apart)
    return MtpLayer(setup, attention, mlp, config.hidden_size, config.rms_norm_eps)


def _layer_parts(
    config: MoeConfig, setup: LayerSetup, rope: RopeTable, number: int, layout: ExpertsLayout
) -> tuple[SelfAttention, nn.Module]:
    shape = attention_shape(config, number, has_qk_norm=config.has_qk_norm)
    return SelfAttention(setup, shape, rope), moe_or_mlp(config, setup, number, layout)


def _rope(config: MoeConfig, setup: LayerSetup) -> RopeTable:
    return rope_table(setup, config.rope, config.head_dim, config.max_model_len)


def moe_or_mlp(config: MoeConfig, setup: LayerSetup, layer: int, layout: ExpertsLayout = apart) -> nn.Module:
    """What stands behind that layer's attention."""
    if config.experts is None or layer in config.dense_layers:
        return GatedMLP(setup, config.hidden_size, config.intermediate_size)
    return MoeBlock(setup, config.hidden_size, config.experts, layout)
