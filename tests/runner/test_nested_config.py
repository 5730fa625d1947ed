"""config.json of a language model inside of a larger one: both objects count, and neither may say what is not done."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import Gemma3Config

from worker.loader.config import ModelConfig
from worker.loader.errors import ModelConfigError
from worker.loader.families import gemma3
from worker.loader.hf_config import config_from_hf
from worker.loader.quantized.schemes import PackedInt

INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}  # fmt: skip
KIMI_TEXT: Mapping[str, Any] = {
    "_name_or_path": "", "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "add_cross_attention":
    False, "attention_bias": False, "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "ep_size":
    1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 262144, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config":
    INT4, "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
KIMI: Mapping[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "bos_token_id": 163584,
    "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "pad_token_id": 163839,
    "tie_word_embeddings": False, "use_unified_vision_chunk": True, "vision_config": {"patch_size": 14},
}  # fmt: skip


def kimi(text: Mapping[str, Any] | None = None, **whole: Any) -> ModelConfig:
    return config_from_hf({**KIMI, "text_config": {**KIMI_TEXT, **(text or {})}, **whole}, {})


def test_a_published_kimi() -> None:
    config = kimi()
    assert (config.num_layers, config.num_heads, config.vocab_size, config.max_model_len) == (61, 64, 163840, 262144)
    assert config.dtype == "bfloat16" and not config.tie_word_embeddings and config.eos_token_ids == (163585,)
    assert config.quantized is not None
    assert config.quantized.scheme_of("language_model.model.layers.1.mlp.experts.0.up_proj") == PackedInt(4, 32, True)
    assert config.quantized.is_ignored("language_model.model.layers.0.self_attn.o_proj")


def test_what_the_whole_says_counts() -> None:
    assert kimi(dtype="float16").dtype == "float16"
    assert kimi(tie_word_embeddings=True).tie_word_embeddings
    assert kimi({"quantization_config": None}, quantization_config=INT4).quantized == kimi().quantized
    config = kimi({"eos_token_id": [7, 163840]}, eos_token_id=5)
    assert config.eos_token_ids == (5, 7)
    assert config.remarks == (
        "config.json: text_config.eos_token_id names 163840, beyond the vocabulary of 163840: left out",
    )


@pytest.mark.parametrize(
    ("text", "whole", "message"),
    [
        ({"surprise": 1}, {}, "config.json: text_config.surprise is 1; fields that are not known here"),
        ({}, {"surprise": 1}, "config.json: surprise is 1; fields that are not known here"),
        ({"model_type": "llama"}, {}, "text_config.model_type is 'llama'; nothing but"),
        ({"is_encoder_decoder": True}, {}, "text_config.is_encoder_decoder is True"),
        ({"scoring_func": "softmax"}, {}, "text_config.scoring_func is 'softmax'"),
        ({"rope_scaling": {"type": "dynamic"}}, {}, "text_config.rope_scaling.type is 'dynamic'"),
        ({"hidden_size": "7168"}, {}, "text_config.hidden_size is '7168'; a whole number"),
        ({}, {"quantization_config": INT4}, "quantization_config is"),
        ({}, {"text_config": [1]}, "text_config is [1]; an object"),
        ({}, {"text_config": None}, "lacks text_config."),
        ({}, {"model_type": "kimi_k3"}, "model_type is 'kimi_k3'; nothing but 'kimi_k25' is supported"),
    ],
)
def test_refusals_name_the_field_and_where_it_is(text: dict[str, Any], whole: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        kimi(text, **whole)
    assert message in str(caught.value)


GEMMA3_4B: Mapping[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip


def test_a_published_gemma3_says_little() -> None:
    """And means what `transformers` takes where it says nothing."""
    twin = Gemma3Config(**GEMMA3_4B).text_config
    config = config_from_hf(dict(GEMMA3_4B), {})
    assert isinstance(config, gemma3.Gemma3Config)
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.max_model_len) == (
        twin.num_hidden_layers, twin.hidden_size, twin.vocab_size, twin.max_position_embeddings
    )  # fmt: skip
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (
        twin.num_attention_heads, twin.num_key_value_heads, twin.head_dim
    )  # fmt: skip
    assert config.is_local == tuple(kind == "sliding_attention" for kind in twin.layer_types)
    assert config.windows[:6] == (1024,) * 5 + (None,) and config.query_scalar == twin.query_pre_attn_scalar
    full, local = twin.rope_parameters["full_attention"], twin.rope_parameters["sliding_attention"]
    assert (config.rope.theta, config.rope.linear_factor) == (full["rope_theta"], full["factor"])
    assert (config.local_rope.theta, config.local_rope.linear_factor) == (local["rope_theta"], 1)
    assert config.tie_word_embeddings and config.dtype == "bfloat16" and config.eos_token_ids == (1, 106)


def test_a_soft_cap_that_transformers_does_not_read_is_refused() -> None:
    text = GEMMA3_4B["text_config"] | {"final_logit_softcapping": 30.0}
    with pytest.raises(ModelConfigError, match=r"text_config\.final_logit_softcapping is 30\.0; nothing but null"):
        config_from_hf({**GEMMA3_4B, "text_config": text}, {})
