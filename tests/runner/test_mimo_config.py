"""config.json of MiMo-V2-Flash: its published form and that of `transformers` say the same."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import MiMoV2FlashConfig

from worker.loader.errors import ModelConfigError
from worker.loader.families.mimo_v2 import MimoConfig
from worker.loader.hf_config import config_from_hf

PUBLISHED: Mapping[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True, "attention_bias": False, "attention_chunk_size": 128,
    "attention_dropout": 0.0, "attention_value_scale": 0.707, "head_dim": 192, "hidden_act": "silu",
    "hidden_size": 4096, "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048, "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "n_group": 1, "n_routed_experts": 256,
    "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 7, "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000,
    "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128,
    "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000,
    "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 152576,
}  # fmt: skip


def read(**changes: Any) -> MimoConfig:
    config = config_from_hf({**PUBLISHED, **changes}, {})
    assert isinstance(config, MimoConfig)
    return config


def test_the_published_form() -> None:
    config = read()
    assert config.is_local == (False, True, True, True, True, False, True)
    assert config.windows == (None, 129, 129, 129, 129, None, 129), "128 tokens before, and the token itself"
    assert config.dense_layers == {0} and config.rms_norm_eps == 1e-5 and config.experts.scale == 1
    assert (config.num_kv_heads, config.head_dim, config.v_head_dim, config.value_scale) == (4, 192, 128, 0.707)
    local = config.local
    assert (local.num_heads, local.num_kv_heads, local.head_dim, config.local_v_head_dim) == (64, 8, 192, 128)
    assert (config.rope.theta, local.rope.theta) == (5e6, 1e4)
    assert config.rope.rotary_dim(192) == local.rope.rotary_dim(192) == 64
    assert "model.mtp.layers.0.input_layernorm.weight".startswith(config.skipped_weights)


def test_the_form_of_transformers_says_the_same() -> None:
    known = {key: value for key, value in PUBLISHED.items() if not key.startswith(("swa_", "add_"))}
    names = {"hybrid_layer_pattern", "moe_layer_freq", "rope_theta", "partial_rotary_factor", "layernorm_epsilon"}
    saved = MiMoV2FlashConfig(**{key: value for key, value in known.items() if key not in names}).to_dict()
    assert "layer_types" in saved and "rope_parameters" in saved and "rms_norm_eps" in saved
    assert config_from_hf(saved, {}) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_shared_experts": 1}, "n_shared_experts is 1; nothing but 0 is supported"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias is False"),
        ({"hybrid_block_size": 4}, "hybrid_block_size is 4"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern is [0, 1]; 0 or 1 for each of the 7 layers"),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1, 2]}, "moe_layer_freq is"),
        ({"layer_types": ["full_attention"] * 7}, "; what hybrid_layer_pattern says is needed"),
        ({"mlp_layer_types": ["sparse"] * 7}, "; what moe_layer_freq says is needed"),
        ({"moe_layer_freq": None, "mlp_layer_types": ["sparse"] * 6}, "dense or sparse for each of the 7 layers"),
        ({"swa_num_key_value_heads": 5}, "swa_num_key_value_heads is 5; a divisor of the 64 attention heads"),
        ({"head_dim": 190}, "head_dim is 190; a size of which partial_rotary_factor"),
        ({"swa_head_dim": 2}, "swa_head_dim is 2; a size of which partial_rotary_factor"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout is 'fused_qkv'; fields that"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta is 10000.0; fields that"),
        ({"v_head_dim": 0}, "v_head_dim is 0; a whole number from 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(**changes)
    assert message in str(caught.value)
