"""What a Llama's config.json says: Llama 2 and 3, SmolLM2, TinyLlama and what shares their shape."""

from dataclasses import replace

from worker.loader.config import ModelConfig
from worker.loader.families.dense import dense_config, expect_full_attention
from worker.loader.fields import Fields


def llama_config(fields: Fields) -> ModelConfig:
    """Raises ModelConfigError."""
    # How matrix products are cut up in `transformers`; the result is the same.
    fields.integer("pretraining_tp", 1)
    expect_full_attention(fields)
    return replace(
        dense_config(fields, "LlamaForCausalLM", "llama"),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )
