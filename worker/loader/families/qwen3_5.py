"""What a Qwen3.5's config.json says, dense or with experts, alone or as the text part of a model that also sees."""

from collections.abc import Callable
from dataclasses import replace

from worker.loader.families.dense import extended
from worker.loader.families.nested import nested_config
from worker.loader.families.qwen3_next import HybridConfig, hybrid_config, hybrid_experts
from worker.loader.fields import Fields

PREFIXES = (("model.language_model.", "model."),)
VISION = ("model.visual.",)


def qwen3_5_config(fields: Fields) -> HybridConfig:
    """Raises ModelConfigError."""
    return _whole(fields, _dense, "Qwen3_5ForConditionalGeneration", "qwen3_5")


def qwen3_5_moe_config(fields: Fields) -> HybridConfig:
    """Raises ModelConfigError."""
    return _whole(fields, _moe, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")


def _whole(fields: Fields, parse: Callable[[Fields], HybridConfig], architecture: str, model_type: str) -> HybridConfig:
    if "text_config" not in fields:
        return parse(fields)
    fields.expect("model_type", model_type)
    config = nested_config(fields, parse, is_tied=False)
    return replace(config, architecture=architecture, skipped_weights=config.skipped_weights + VISION)


def _dense(fields: Fields) -> HybridConfig:
    return _text(fields, hybrid_config(fields, "Qwen3_5ForCausalLM", "qwen3_5_text"))


def _moe(fields: Fields) -> HybridConfig:
    fields.ignore("intermediate_size")
    base = hybrid_config(fields, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", has_mlp=False)
    return _text(fields, extended(base, HybridConfig, experts=hybrid_experts(fields, is_normalised=True)))


def _text(fields: Fields, config: HybridConfig) -> HybridConfig:
    fields.expect("attn_output_gate", True)
    fields.expect("output_gate_type", "swish")  # of gated DeltaNet
    fields.expect("mamba_ssm_dtype", "float32")
    fields.expect("mlp_only_layers", [])
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of weights that are skipped
    return replace(config, weight_prefixes=PREFIXES)
