"""config.json and generation_config.json: published ones load, what would change the computation is refused by name."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.runner.conftest import TINY
from worker.kernels.select import Kernels
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.loader.errors import ModelConfigError, UnknownArchitectureError
from worker.loader.families.registry import FAMILIES
from worker.loader.hf_config import config_from_hf, load_hf_config
from worker.loader.rope import Llama3Scaling, RopeConfig, rope_frequencies
from worker.models.registry import MODELS
from worker.parallel.group import Group

LLAMA: Mapping[str, Any] = dict(TINY, architectures=["LlamaForCausalLM"], model_type="llama")
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA_3_1_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Llama-2-7b-hf": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Meta-Llama-3-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128009, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Llama-3.1-8B-Instruct": LLAMA_3_1_8B,
    "Llama-3.2-1B-Instruct": {
        **LLAMA_3_1_8B, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    },
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "use_cache": True, "vocab_size": 49152,
    },
    "TinyLlama-1.1B-Chat-v1.0": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22,
        "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.35.0", "use_cache": True, "vocab_size": 32000,
    },
}  # fmt: skip


def read(generation: Mapping[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return config_from_hf({**LLAMA, **changes}, dict(generation or {}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    source = PUBLISHED[name]
    config, twin = config_from_hf(dict(source), {}), LlamaConfig(**source)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (
        twin.hidden_size, twin.num_hidden_layers, twin.vocab_size
    )  # fmt: skip
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (
        twin.num_attention_heads, twin.num_key_value_heads, twin.head_dim
    )  # fmt: skip
    assert config.dtype == source["torch_dtype"] and config.remarks == ()
    wanted = LlamaRotaryEmbedding(twin).inv_freq
    assert torch.tensor(rope_frequencies(config.rope, config.head_dim)) == pytest.approx(wanted)


def test_every_family_has_a_model() -> None:
    assert FAMILIES.keys() == MODELS.keys()


# --- ids


def test_eos_ids_of_both_files_count() -> None:
    assert read({"eos_token_id": [7, 2]}, eos_token_id=[2, 5]).eos_token_ids == (7, 2, 5)
    assert read(eos_token_id=3).eos_token_ids == (3,)
    assert read(eos_token_id=None).eos_token_ids == ()


def test_ids_beyond_the_vocabulary_are_left_out_and_named() -> None:
    config = read({"eos_token_id": [130, 5000]}, eos_token_id=171)
    assert config.eos_token_ids == (130,)
    assert config.remarks == (
        "generation_config.json: eos_token_id names 5000, beyond the vocabulary of 131: left out",
        "config.json: eos_token_id names 171, beyond the vocabulary of 131: left out",
    )


@pytest.mark.parametrize("value", [-1, "2", 2.0, True, [2, -1], [[2]], [None], {"id": 2}])
def test_what_is_no_id_is_refused(value: object) -> None:
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: eos_token_id is .*; a token id"):
        read({"eos_token_id": value})


def test_advice_that_is_not_followed_is_named() -> None:
    """In one line; what changes nothing, and what routers do, is not among it."""
    neutral = {"forced_eos_token_id": None, "typical_p": 1.0, "num_beams": 1, "token_healing": False, "min_length": 0}
    followed = {"stop_strings": ["a"], "bad_words_ids": [[1]], "suppress_tokens": [1], "do_sample": True}
    assert read(neutral | followed).remarks == ()
    assert read(neutral | {"typical_p": 0.9, "no_repeat_ngram_size": 3, "guidance_scale": 1.5}).remarks == (
        "generation_config.json: not followed: guidance_scale, no_repeat_ngram_size, typical_p",
    )


# --- what would change the computation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation is 'gelu_pytorch_tanh'; fields that are"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; nothing but 'silu' or 'swish' is supported"),
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window is 4096"),
        ({"q_lora_rank": 1536}, "q_lora_rank is 1536"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256"),
        ({"embedding_multiplier": 12}, "embedding_multiplier is 12"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; nothing but 1 is supported"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic'; one of"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention is"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor is 0.25"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2}}, "only one of"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; a divisor of the 6 attention heads"),
        ({"head_dim": 7}, "head_dim is 7; an even number"),
        ({"head_dim": None, "hidden_size": 50}, "head_dim is absent; a number"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; one of float32"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(**changes)
    assert message in str(caught.value) and str(caught.value).startswith("config.json")


def test_all_unknown_fields_are_named_at_once() -> None:
    with pytest.raises(ModelConfigError, match=r"^config\.json: b is 1; z is \[2\]; fields that are not known here"):
        read(z=[2], b=1)
    with pytest.raises(ModelConfigError, match=r"k9 is 1 \(and 2 more\); fields"):
        read(**{f"k{i:x}": 1 for i in range(12)})


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 3},
        {"partial_rotary_factor": 1.0},
        {"hidden_activation": None},
        {"_attn_implementation_autoset": True},
        {"pretraining_tp": 4},
    ],
)
def test_what_changes_nothing_is_no_hindrance(changes: dict[str, Any]) -> None:
    assert read(**changes) == read()


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [7], ["MambaForCausalLM"]])
def test_architectures_that_are_none(names: object) -> None:
    with pytest.raises(ModelConfigError, match="architecture"):
        read(architectures=names)


def test_the_architecture_is_told_before_a_field_that_belongs_to_it() -> None:
    with pytest.raises(UnknownArchitectureError, match=r"'GemmaForCausalLM'.*LlamaForCausalLM"):
        read(architectures=["GemmaForCausalLM"], hidden_activation="gelu_pytorch_tanh")


def test_an_unknown_architecture_is_told_what_is_known_and_what_else_might_run_it() -> None:
    with pytest.raises(UnknownArchitectureError) as raised:
        read(architectures=["NobodyForCausalLM"])
    said = str(raised.value)
    assert "architecture 'NobodyForCausalLM' is not supported" in said and "--model-impl transformers" in said
    assert all(name in said for name in FAMILIES)


# --- quantised checkpoints


def test_another_programs_form_of_quantised_weights_is_refused() -> None:
    with pytest.raises(ModelConfigError, match=r"quantization is .*'group_size': 64.*; nothing but null is supported"):
        read(quantization={"group_size": 64, "bits": 4})


def test_a_quantisers_own_file_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelConfigError, match=r"hf_quant_config\.json says that weights are quantised; config\.json"):
        load_hf_config(tmp_path)


# --- rotary position embedding


def test_older_spelling_of_rope_scaling() -> None:
    old = read(rope_theta=500000.0, rope_scaling=LLAMA3_ROPE)
    assert old.rope == RopeConfig(500000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
        {"rope_type": "llama3", "rope_theta": 1e4} | {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"},
        YARN,
        YARN | {"factor": 1.0},
        YARN | {"original_max_position_embeddings": None},
        YARN | {"beta_fast": 3, "beta_slow": 2.5, "truncate": False},
        YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
        YARN | {"mscale": 2.0},
    ],
)
def test_scalings_are_those_of_transformers(rope: dict[str, Any]) -> None:
    given = {key: value for key, value in rope.items() if value is not None}
    twin = LlamaRotaryEmbedding(LlamaConfig(**(TINY | {"head_dim": 64, "rope_parameters": dict(given)})))
    wanted_cos, wanted_sin = twin(torch.zeros(1), torch.arange(256)[None])
    setup = LayerSetup(Kernels(torch.device("cpu")), Group(), torch.float32)
    table = rope_table(setup, read(head_dim=64, rope_parameters=rope).rope, 64, 256)
    cos, sin = table.cos, table.sin
    assert (cos - wanted_cos[0]).abs().max() < 1e-4
    assert (sin[:, 32:] - wanted_sin[0, :, 32:]).abs().max() < 1e-4


def test_rope_divisors_of_a_gguf_file_equal_the_llama3_formula() -> None:
    scaled = RopeConfig(500000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain, wanted = rope_frequencies(RopeConfig(500000.0), 64), rope_frequencies(scaled, 64)
    divisors = tuple(a / b for a, b in zip(plain, wanted, strict=True))
    assert rope_frequencies(RopeConfig(500000.0, frequency_divisors=divisors), 64) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn"}, "lacks rope_parameters.factor"),
        ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor is 0"),
        ({"rope_type": "linear", "factor": math.nan}, "rope_parameters.factor is nan"),
        ({"rope_theta": 1}, "rope_parameters.rope_theta is 1"),
        (LLAMA3_ROPE | {"high_freq_factor": 1.0}, "rope_parameters.high_freq_factor is 1.0; a number above 1"),
        ({"rope_type": "default", "factor": 2.0}, "rope_parameters.factor is 2.0; fields that are not known here"),
    ],
)
def test_scalings_without_sense_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(rope_parameters=rope)
    assert message in str(caught.value)


# --- other dense families

QWEN3_8B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B_V03: Mapping[str, Any] = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
    "vocab_size": 32768,
}  # fmt: skip


def test_published_qwen3_and_mistral() -> None:
    qwen, mistral = config_from_hf(dict(QWEN3_8B), {}), config_from_hf(dict(MISTRAL_7B_V03), {})
    assert (qwen.head_dim, qwen.num_kv_heads, qwen.max_model_len, qwen.rope.theta) == (128, 8, 40960, 1e6)
    assert (mistral.head_dim, mistral.num_kv_heads, mistral.max_model_len) == (128, 8, 32768)


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (QWEN3_8B, {"layer_types": ["full_attention"] * 35}, "layer_types"),
        (QWEN3_8B, {"layer_types": ["sliding_attention"] * 36}, "sliding_window"),
        (QWEN3_8B, {"mlp_bias": True}, "mlp_bias"),
        (QWEN3_8B, {"num_experts": 8}, "num_experts"),
        (MISTRAL_7B_V03, {"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        (MISTRAL_7B_V03, {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_qwen3_and_mistral_do_not_have_is_refused(
    config: Mapping[str, Any], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ModelConfigError, match=field):
        config_from_hf({**config, **changes}, {})


def test_a_window_that_is_not_mentioned_is_the_familys_own() -> None:
    """`transformers` takes 4,096 for a Mistral; beyond that the two would differ."""
    config = {key: value for key, value in MISTRAL_7B_V03.items() if key != "sliding_window"}
    assert config_from_hf(config, {}).windows == (4096,) * 32
    assert config_from_hf({**config, "max_position_embeddings": 4096}, {}).windows == (), "none hides anything"
    assert config_from_hf({**config, "sliding_window": None}, {}).windows == ()


def test_windows_of_qwens_later_layers() -> None:
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 34}
    assert config_from_hf({**QWEN3_8B, **changes}, {}).windows == (None,) * 34 + (4096,) * 2
