"""config.json of Gemma 4: its published form and that of `transformers` say the same; what is not done is refused."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from worker.loader.errors import ModelConfigError
from worker.loader.families.gemma4 import Gemma4Config
from worker.loader.hf_config import config_from_hf
from worker.loader.rope import rope_frequencies

TYPES = (["sliding_attention"] * 4 + ["full_attention"]) * 7
ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
TEXT: Mapping[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2,
    "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
    "hidden_size_per_layer_input": 256, "initializer_range": 0.02, "intermediate_size": 6144, "layer_types": TYPES,
    "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 35,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": ROPES, "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None,
    "use_bidirectional_attention": None, "use_cache": True, "use_double_wide_mlp": True, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
WHOLE: Mapping[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": {"hidden_size": 1024},
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16",
    "eoa_token_id": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
    "initializer_range": 0.02, "model_type": "gemma4", "text_config": TEXT, "tie_word_embeddings": True,
    "video_token_id": 258884, "vision_config": {"hidden_size": 768}, "vision_soft_tokens_per_image": 280,
}  # fmt: skip


def text(**changes: Any) -> Gemma4Config:
    config = config_from_hf({"architectures": ["Gemma4ForCausalLM"], **TEXT, **changes}, {})
    assert isinstance(config, Gemma4Config)
    return config


def test_a_small_one_whose_last_layers_share_keys() -> None:
    config = text()
    assert (config.head_dim, config.full.head_dim, config.num_kv_heads, config.full.num_kv_heads) == (256, 512, 1, 1)
    assert config.source_layers == (None,) * 15 + ((13,) * 4 + (14,)) * 4
    assert config.windows[:6] == (512, 512, 512, 512, None, 512)
    assert (config.is_wide, config.per_layer_size, config.per_layer_vocab_size) == (True, 256, 262144)
    assert config.logit_soft_cap == 30 and config.tie_word_embeddings
    published = "model.layers.15.self_attn.k_proj.weight", "model.layers.34.self_attn.v_norm.weight"
    assert all(name.startswith(config.skipped_weights) for name in published), "files have them, nobody uses them"
    own = "model.layers.14.self_attn.k_proj.weight", "model.layers.15.self_attn.q_proj.weight"
    assert not any(name.startswith(config.skipped_weights) for name in own)


def test_a_large_one_whose_keys_are_values() -> None:
    changes = {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_kv_shared_layers": 0}
    config = text(num_attention_heads=32, num_key_value_heads=16, use_bidirectional_attention="vision", **changes)
    assert (config.num_kv_heads, config.full.num_kv_heads, config.has_keys_as_values) == (16, 4, True)
    assert set(config.source_layers) == {None}
    assert text(num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4).full.num_kv_heads == 16


def test_inside_of_a_model_that_sees_and_hears() -> None:
    config = config_from_hf(dict(WHOLE), {})
    assert isinstance(config, Gemma4Config)
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16"
    assert config.source_layers == text().source_layers
    names = "model.vision_tower.a", "model.embed_vision.a", "model.audio_tower.a", "model.embed_audio.a"
    assert all(name.startswith(config.skipped_weights) for name in names)


@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 2}])
def test_the_form_of_transformers_says_the_same(changes: dict[str, Any]) -> None:
    changes = changes | {"num_key_value_heads": 4}
    saved = json.loads(Gemma4TextConfig(**{**TEXT, **changes}).to_json_string(use_diff=False))
    assert "per_layer_config" in saved and "global_head_dim" not in saved
    assert config_from_hf(saved | {"architectures": ["Gemma4ForCausalLM"]}, {}) == text(**changes)


def test_angles_are_those_of_transformers() -> None:
    for ropes in (None, ROPES, ROPES | {"full_attention": ROPES["full_attention"] | {"factor": 8.0}}):
        twin = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**{**TEXT, "rope_parameters": ropes}))
        config = text(rope_parameters=ropes)
        for kind, wanted in (
            (config, twin.sliding_attention_inv_freq), (config.full, twin.full_attention_inv_freq),
        ):  # fmt: skip
            assert torch.tensor(rope_frequencies(kind.rope, kind.head_dim)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True, "num_experts": 9, "top_k_experts": 10}, "top_k_experts is 10; a whole number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; nothing but 'vision'"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"layer_types": ["full_attention"] * 34 + ["sliding_attention"]}, "; full_attention in the last layer is"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers is 31; a number that leaves a layer of each kind"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35; a number that leaves a layer of each kind"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100; a whole number from 262144"),
        ({"global_head_dim": 511}, "global_head_dim is 511; an even number"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads is 3; a divisor"),
        ({"num_key_value_heads": None}, "lacks num_key_value_heads"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config is"),
        ({"per_layer_config": {"4": {"sliding_window": 5}}}, "per_layer_config.4.sliding_window is 5; fields that"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_type is 'dynamic'; one of default"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor is 0.5; nothing but 1 is supported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "rope_parameters.full_attention.partial_rotary_factor is 2; a number of at most 1",
        ),
        ({"altup_num_inputs": 4}, "altup_num_inputs is 4; fields that are not known here"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        text(**changes)
    assert message in str(caught.value)
