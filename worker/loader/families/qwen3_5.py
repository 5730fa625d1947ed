"""What a Qwen3.5's config.json says, dense or with experts, alone or as the text part of a model that also sees."""

from dataclasses import replace

from worker.loader.families.dense import extended
from worker.loader.families.nested import Whole, nested_config
from worker.loader.families.qwen3_next import HybridConfig, hybrid_config, hybrid_experts
from worker.loader.fields import Fields

WHOLE = Whole(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    weight_prefixes=(("model.language_model.", "model."),),
    other_weights=("model.visual.",),
    is_tied=False,
)
WHOLE_MOE = replace(WHOLE, architecture="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe")


def qwen3_5_config(fields: Fields) -> HybridConfig:
    """Raises ModelConfigError."""
    return nested_config(fields, _dense, WHOLE) if "text_config" in fields else _dense(fields)


def qwen3_5_moe_config(fields: Fields) -> HybridConfig:
    """Raises ModelConfigError."""
    return nested_config(fields, _moe, WHOLE_MOE) if "text_config" in fields else _moe(fields)


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
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # the weights tell
    return replace(config, weight_prefixes=WHOLE.weight_prefixes)
