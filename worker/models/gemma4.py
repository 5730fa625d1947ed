"""Gemma4ForCausalLM and the language model of Gemma4ForConditionalGeneration: layers with a window and layers that see
everything have heads and angles of their own, and the last layers may see what earlier ones see."""

from dataclasses import replace

from worker.layers.blocks import GatedMLP
from worker.layers.gemma4 import Gemma4Decoder, Gemma4ExpertsLayer, Gemma4Layer
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.layers.shared_kv import OwnKvAttention, SharedKvAttention
from worker.loader.checkpoint import WeightTarget, both
from worker.loader.families.gemma4 import Gemma4Config
from worker.models.dense import DecoderForCausalLM, attention_shape


class Gemma4ForCausalLM(DecoderForCausalLM):
    def __init__(self, config: Gemma4Config, setup: LayerSetup) -> None:
        kinds = {True: config, False: config.full}
        ropes = {
            is_local: rope_table(setup, kind.rope, kind.head_dim, config.max_model_len)
            for is_local, kind in kinds.items()
        }
        layers: list[Gemma4Layer] = []
        for layer, (is_local, source) in enumerate(zip(config.is_local, config.source_layers, strict=True)):
            shape = replace(
                attention_shape(kinds[is_local], layer, has_qk_norm=True), window=config.window(layer), scale=1.0
            )
            attention: OwnKvAttention | SharedKvAttention
            if source is None:
                attention = OwnKvAttention(setup, shape, ropes[is_local], config.rms_norm_eps, layer)
            else:
                own = layers[source].self_attn
                assert isinstance(own, OwnKvAttention)
                attention = SharedKvAttention(setup, shape, own, config.rms_norm_eps)
            size = config.intermediate_size * (2 if config.is_wide and source is not None else 1)
            mlp = GatedMLP(setup, config.hidden_size, size, activation="gelu_tanh")
            parts = (setup, attention, mlp, config.hidden_size, config.per_layer_size, config.rms_norm_eps)
            layers.append(Gemma4Layer(*parts) if config.experts is None else Gemma4ExpertsLayer(*parts, config.experts))
        decoder = Gemma4Decoder(
            setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps, config.per_layer_size,
            config.per_layer_vocab_size,
        )  # fmt: skip
        super().__init__(config, setup, decoder, config.logit_soft_cap)
        self._has_keys_as_values = {
            f"model.layers.{layer}.self_attn"
            for layer, (is_local, source) in enumerate(zip(config.is_local, config.source_layers, strict=True))
            if config.has_keys_as_values and not is_local and source is None
        }

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Where keys are values, too, checkpoints have their projection once; experts and their router are parts of the
        layer."""
        targets = {_stored_name(name): target for name, target in super().weight_targets().items()}
        for name in list(targets):
            path, _, part = name.partition(".v_proj.")
            if path in self._has_keys_as_values and part:
                key = f"{path}.k_proj.{part}"
                targets[key] = both(targets[key], targets.pop(name))
        return targets


def _stored_name(name: str) -> str:
    layer, is_moe, part = name.partition(".moe.")
    if not is_moe:
        return name
    part = part.replace("gate.weight", "gate.proj.weight").replace("gate.", "router.")
    return f"{layer}.{part}"
