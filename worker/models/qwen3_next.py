"""Qwen3NextForCausalLM: gated DeltaNet in most layers, gated attention in the others, experts beside a shared one."""

from dataclasses import replace

from torch import nn

from worker.kernels.elementwise import RopeTable
from worker.layers.blocks import DecoderLayer, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.delta import DeltaShape, GatedDeltaNet, StoredAs
from worker.layers.experts import apart, stacked
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import WeightTarget
from worker.loader.families.qwen3_next import HybridConfig
from worker.models.dense import DecoderForCausalLM, attention_shape
from worker.models.moe import moe_or_mlp
from worker.models.mtp import MtpLayer


class HybridForCausalLM(DecoderForCausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: HybridConfig, setup: LayerSetup, stored_as: StoredAs) -> None:
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        delta = _delta_shape(config, stored_as)
        layers = []
        for layer in range(config.num_layers):
            mixer: nn.Module
            if layer in config.linear_layers:
                mixer = GatedDeltaNet(setup, delta)
            else:
                mixer = _gated_attention(config, setup, rope, layer)
            mlp = _mlp(config, setup, layer)
            layers.append(
                DecoderLayer(setup, mixer, mlp, config.hidden_size, config.rms_norm_eps, has_offset_norms=True)
            )
        decoder = Decoder(
            setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps, has_offset_norm=True
        )
        super().__init__(config, setup, decoder)
        self._linear = tuple(f"model.layers.{layer}.self_attn." for layer in config.linear_layers)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {self._stored_name(name): target for name, target in super().weight_targets().items()}

    def _stored_name(self, name: str) -> str:
        if name.startswith(self._linear):
            return name.replace(".self_attn.", ".linear_attn.")
        return name.replace(".shared_experts.", ".shared_expert.")


class Qwen3NextForCausalLM(HybridForCausalLM):
    def __init__(self, config: HybridConfig, setup: LayerSetup) -> None:
        super().__init__(config, setup, "by key head")


def hybrid_mtp_layer(config: HybridConfig, setup: LayerSetup) -> MtpLayer:
    """With attention, and experts where the model has some."""
    rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
    attention = _gated_attention(config, setup, rope, config.num_layers)
    mlp = _mlp(config, setup, config.num_layers)
    return MtpLayer(setup, attention, mlp, config.hidden_size, config.rms_norm_eps, has_offset_norms=True)


def _gated_attention(config: HybridConfig, setup: LayerSetup, rope: RopeTable, layer: int) -> SelfAttention:
    shape = attention_shape(config, layer, has_qk_norm=True)
    return SelfAttention(setup, replace(shape, has_offset_norms=True, is_gated=True), rope)


def _mlp(config: HybridConfig, setup: LayerSetup, layer: int) -> nn.Module:
    return moe_or_mlp(config, setup, layer, stacked if config.has_stacked_experts else apart)


def _delta_shape(config: HybridConfig, stored_as: StoredAs) -> DeltaShape:
    delta = config.delta
    return DeltaShape(
        hidden_size=config.hidden_size,
        num_key_heads=delta.num_key_heads,
        num_value_heads=delta.num_value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        width=delta.width,
        norm_eps=config.rms_norm_eps,
        stored_as=stored_as,
    )
