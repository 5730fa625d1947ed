"""Small GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


class Quantised(NamedTuple):
    data: np.ndarray
    """uint8 [..., bytes of a row]"""
    kind: GGMLQuantizationType


def architecture_of(model: PreTrainedModel) -> str:
    return model.config.model_type.removesuffix("_text")


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Of a GGUF of this model, without a tokenizer."""
    config = model.config
    keys = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": config.vocab_size,
    }
    kind = architecture_of(model)
    return {key.replace("llama", kind): value for key, value in keys.items()} | {"tokenizer.ggml.eos_token_id": 2}


def write_metadata(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Quantised], architecture: str = "llama"
) -> None:
    """The types of the fields are those of the Python values; whole numbers are uint32. None: no such field."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, values in tensors.items():
        if isinstance(values, Quantised):
            writer.add_tensor(name, values.data, raw_dtype=values.kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, model: PreTrainedModel, **changes: Any) -> None:
    """A GGUF of a tied model, Llama's with q and k in llama.cpp's order of rows. `changes` of the metadata."""
    write_metadata(path, metadata_of(model) | changes, tensors_of(model), architecture_of(model))


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    tensors = {}
    is_gemma3 = model.config.model_type == "gemma3_text"
    names = NAMES | (GEMMA3_NAMES if is_gemma3 else {})
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if model.config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = values.reshape(-1, 2, model.config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
        if is_gemma3 and name.endswith("norm.weight"):
            values = values + 1
        if name in TOP:
            tensors[TOP[name]] = values
        else:
            _, _, layer, rest = name.split(".", 3)
            module, _, part = rest.rpartition(".")
            tensors[f"blk.{layer}.{names[module]}.{part}"] = values
    return tensors
