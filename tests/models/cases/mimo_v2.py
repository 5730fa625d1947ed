"""MiMo-V2-Flash."""

from typing import Any

import torch
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashAttention, MiMoV2FlashRotaryEmbedding

from tests.models.cases import SMALL

MIMO = SMALL | {
    "num_attention_heads": 8, "head_dim": 18, "v_head_dim": 8, "sliding_window": 20, "attention_value_scale": 0.7,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "moe_intermediate_size": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip


def with_local(**local: Any) -> MiMoV2FlashForCausalLM:
    """Layers with a window have sizes of their own, which files can say and `transformers` does not read."""
    config = MiMoV2FlashConfig(**MIMO | {"attention_bias": True}, **{f"swa_{key}": n for key, n in local.items()})
    model = MiMoV2FlashForCausalLM(config)
    # Whose layers with a window have twice as many KV heads.
    halved = local | {"num_key_value_heads": local["num_key_value_heads"] // 2}
    own = MiMoV2FlashConfig(**MIMO | {"attention_bias": True} | halved, attn_implementation="eager")
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.sinks is not None:
            layer.self_attn = MiMoV2FlashAttention(own, number)
            for weight in layer.self_attn.parameters():
                torch.nn.init.normal_(weight, std=0.3)
    model.model.rotary_emb.sliding_attention_inv_freq = MiMoV2FlashRotaryEmbedding(own).sliding_attention_inv_freq
    return model


ATTENTION = "GQA, in most layers a window, sinks and more KV heads; values narrower than keys"
CASES = {
    "mimo-v2-flash": lambda: MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**MIMO)),
    "mimo-v2-flash-local-heads": lambda: with_local(
        num_attention_heads=4, num_key_value_heads=4, head_dim=24, v_head_dim=12
    ),
}
