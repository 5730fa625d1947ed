"""GGUF files of tiny models with experts."""

import re
from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import TensorNameMap
from safetensors.numpy import load_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.models.saved import Saved
from tests.runner.gguf_files import metadata_of

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def glm_metadata(config: PretrainedConfig, num_mtp: int) -> dict[str, Any]:
    said = {
        "block_count": config.num_hidden_layers + num_mtp,
        "nextn_predict_layers": num_mtp,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim // 2,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }
    return {f"glm4moe.{key}": value for key, value in said.items()} | {"tokenizer.ggml.eos_token_id": 2}


def qwen3_metadata(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    said = metadata_of(model) | {
        "qwen3_moe.expert_count": config.num_experts,
        "qwen3_moe.expert_used_count": config.num_experts_per_tok,
        "qwen3_moe.expert_feed_forward_length": config.moe_intermediate_size,
        "qwen3_moe.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    return {key.replace("qwen3_moe.", "qwen3moe."): value for key, value in said.items()}


def gguf_tensors(saved: Saved, kind: MODEL_ARCH, num_blocks: int) -> dict[str, np.ndarray]:
    names, found = TensorNameMap(kind, num_blocks), dict[str, Any]()
    for name, values in load_file(saved.path / "model.safetensors").items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        expert = EXPERT.fullmatch(name)
        whole = f"{expert[1]}.{expert[3]}" if expert else name
        module, _, part = whole.rpartition(".")
        key = f"{names.get_name(module)}.{part}"
        if expert:
            found.setdefault(key, {})[int(expert[2])] = values
        else:
            found[key] = values
    return {
        key: np.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for key, value in found.items()
    }
