"""What the config.json of a DeepSeek-V3 or V3.2 says, and of what shares its shape: Kimi-K2, Moonlight."""

from dataclasses import dataclass

from worker.loader.config import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY
from worker.loader.families.dense import DTYPES
from worker.loader.families.moe import MoeConfig, deepseek_experts, first_dense_layers
from worker.loader.families.mtp import mtp_weights
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope
from worker.loader.rope import RopeConfig, yarn_attention_factor

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
"""Two names of one thing: transformers wrote the second one at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Of DeepSeek-V3.2's sparse attention."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(MoeConfig):
    """`head_dim` is that of the rotated part."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    v_head_dim: int
    attention_scale: float
    is_interleaved: bool
    index: IndexConfig | None = None


def deepseek_v3_config(fields: Fields) -> DeepseekConfig:
    """Raises ModelConfigError."""
    fields.expect("model_type", *MODEL_TYPES)
    return _config(fields, "DeepseekV3ForCausalLM")


def deepseek_v32_config(fields: Fields) -> DeepseekConfig:
    """Raises ModelConfigError."""
    fields.expect("model_type", "deepseek_v32")
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.expect("rope_interleave", True)
    if set(fields.texts("layer_types", [])) - INDEXED_LAYERS:
        raise fields.error("layer_types", "indexed_attention in every layer")
    index = IndexConfig(
        num_heads=fields.integer("index_n_heads", most=MAX_SIZE),
        head_dim=fields.integer("index_head_dim", most=MAX_SIZE),
        top_k=fields.integer("index_topk", most=MAX_CONTEXT),
    )
    config = _config(fields, "DeepseekV32ForCausalLM", index)
    if config.q_lora_rank is None:
        raise fields.error("q_lora_rank", "a whole number (the index reads the queries' latent)")
    if index.head_dim < config.head_dim:
        raise fields.error("index_head_dim", f"qk_rope_head_dim, {config.head_dim}, or more")
    return config


def _config(fields: Fields, architecture: str, index: IndexConfig | None = None) -> DeepseekConfig:
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("output_router_logits", False)
    num_heads = fields.integer("num_attention_heads", most=MAX_SIZE)
    fields.expect("num_key_value_heads", num_heads)
    max_model_len = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    # How matrix products and experts are cut up elsewhere; the result is the same.
    fields.integer("pretraining_tp", 1)
    fields.integer("ep_size", 1)
    fields.ignore("aux_loss_alpha", "seq_aux")  # of training
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    rope_dim, nope_dim = (fields.integer(f"qk_{part}_head_dim", most=MAX_SIZE) for part in ("rope", "nope"))
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    fields.expect("head_dim", rope_dim)
    fields.expect("qk_head_dim", nope_dim + rope_dim)
    q_lora_rank = fields.integer("q_lora_rank", most=MAX_SIZE) if "q_lora_rank" in fields else None
    if q_lora_rank is None:
        fields.expect("attention_bias", False)
    rope = hf_rope(fields, max_model_len)
    dense = first_dense_layers(fields, num_layers)
    return DeepseekConfig(
        architecture=architecture,
        hidden_size=fields.integer("hidden_size", most=MAX_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=rope_dim,
        intermediate_size=fields.integer("intermediate_size", most=MAX_SIZE),
        vocab_size=fields.integer("vocab_size", most=MAX_VOCABULARY),
        max_model_len=max_model_len,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32", one_of=DTYPES), one_of=DTYPES),
        q_lora_rank=q_lora_rank,
        kv_lora_rank=fields.integer("kv_lora_rank", most=MAX_SIZE),
        nope_head_dim=nope_dim,
        v_head_dim=fields.integer("v_head_dim", most=MAX_SIZE),
        attention_scale=(nope_dim + rope_dim) ** -0.5 * _mscale(fields, rope) ** 2,
        is_interleaved=fields.flag("rope_interleave", True),
        index=index,
        dense_layers=dense,
        experts=deepseek_experts(fields) if len(dense) < num_layers or "n_routed_experts" in fields else None,
        skipped_weights=mtp_weights(fields, num_layers),
    )


def _mscale(fields: Fields, rope: RopeConfig) -> float:
    """That queries and keys are multiplied by each, so that long contexts keep their sharpness (YaRN)."""
    section = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    all_dims = section.number("mscale_all_dim", 0.0, or_zero=True)
    return yarn_attention_factor(rope.yarn.factor, all_dims) if rope.yarn is not None and all_dims else 1.0
