"""config.json of models with gated DeltaNet: published ones are read, what is not known is refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.models.cases.qwen3_next import NEXT
from tests.models.saved import save
from tests.runner.conftest import make_driver
from worker.loader.errors import ModelConfigError
from worker.loader.families.qwen3_next import DeltaConfig, HybridConfig
from worker.loader.hf_config import config_from_hf

NEXT_80B: Mapping[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
TEXT_27B: Mapping[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish",
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_5_moe_text", "intermediate_size": None, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001,
}  # fmt: skip


def qwen3_5(text: Mapping[str, Any], kind: str = "", **whole: Any) -> HybridConfig:
    """`kind`: what stands in the names, Moe or nothing."""
    config = {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"], "image_token_id": 248056,
        "model_type": "qwen3_5_moe" if kind else "qwen3_5", "text_config": dict(text), "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0", "video_token_id": 248057, "vision_config": {"depth": 27},
        "vision_end_token_id": 248054, "vision_start_token_id": 248053,
    }  # fmt: skip
    found = config_from_hf(config | whole, {})
    assert isinstance(found, HybridConfig)
    return found


def test_published_qwen3_next() -> None:
    config = config_from_hf(dict(NEXT_80B), {})
    assert isinstance(config, HybridConfig) and config.experts is not None
    assert config.delta == DeltaConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, width=4)
    assert [i for i in range(48) if i not in config.linear_layers] == list(range(3, 48, 4))
    assert config.rope.rotary_dim(config.head_dim) == 64
    assert (config.experts.num_experts, config.experts.shared_size, config.dense_layers) == (512, 512, frozenset())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 48}, "layer_types is .*; full_attention in at least one layer"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; linear_attention or full_attention for each"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types is .*; linear_attention or full_attention"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24; a multiple of the 16"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; a whole number from 2"),
        ({"linear_key_head_dim": None}, "config.json lacks linear_key_head_dim"),
        ({"use_sliding_window": True}, "use_sliding_window is True; nothing but False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2; a number of at most 1"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok is 513; a whole number from 1 to 512"),
        ({"linear_gate": "sigmoid"}, "linear_gate is 'sigmoid'; fields that are not known here"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        config_from_hf(dict(NEXT_80B) | changes, {})


def test_published_qwen3_5() -> None:
    config = qwen3_5(TEXT_27B)
    assert config.delta == DeltaConfig(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, width=4)
    assert (config.intermediate_size, config.experts, config.rope.theta) == (17408, None, 1e7)
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((248044,), "bfloat16", False)
    assert qwen3_5(TEXT_27B, tie_word_embeddings=True).tie_word_embeddings


def test_published_qwen3_5_with_experts() -> None:
    config = qwen3_5({**TEXT_27B, **EXPERTS}, "Moe")
    assert config.experts is not None and config.experts.is_normalised
    assert (config.experts.num_experts, config.experts.shared_size, config.dense_layers) == (256, 512, frozenset())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("", {"attn_output_gate": False}, "text_config.attn_output_gate is False; nothing but True"),
        ("", {"output_gate_type": "sigmoid"}, "text_config.output_gate_type is 'sigmoid'; nothing but 'swish'"),
        ("", {"mamba_ssm_dtype": "bfloat16"}, "text_config.mamba_ssm_dtype is 'bfloat16'"),
        ("", {"intermediate_size": None}, "config.json lacks text_config.intermediate_size"),
        ("", {"num_experts": 8}, "text_config.num_experts is 8; fields that are not known here"),
        ("", {"rope_parameters": {"rope_type": "mrope"}}, "text_config.rope_parameters.rope_type is 'mrope'"),
        ("Moe", {**EXPERTS, "mlp_only_layers": [1]}, r"text_config.mlp_only_layers is \[1\]; nothing but"),
        ("Moe", {**EXPERTS, "norm_topk_prob": False}, "text_config.norm_topk_prob is False; fields"),
        ("Moe", {}, "text_config.model_type is 'qwen3_5_text'"),
    ],
)
def test_what_qwen3_5_does_not_have_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        qwen3_5({**TEXT_27B, **changes}, kind)


def test_what_predicts_further_tokens_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    save(lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**NEXT)), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    more = {f"mtp.{name}": weights["model.norm.weight"].clone() for name in ("norm.weight", "fc.weight")}
    save_file(weights | more, tmp_path / "model.safetensors")
    make_driver(tmp_path)
    assert "2 tensors of the checkpoint are not used: mtp.fc.weight ... mtp.norm.weight" in caplog.messages
