"""What a Mistral's config.json says."""

from worker.loader.config import ModelConfig
from worker.loader.families.dense import dense_config, expect_full_attention
from worker.loader.fields import Fields

DEFAULT_WINDOW = 4096
"""What `transformers` takes where the field is not there at all; null means that there is no window."""


def mistral_config(fields: Fields) -> ModelConfig:
    """Raises ModelConfigError."""
    expect_full_attention(fields)
    config = dense_config(fields, "MistralForCausalLM", "mistral")
    if not fields.mentions("sliding_window") and config.max_model_len > DEFAULT_WINDOW:
        raise fields.error("sliding_window", f"null (absent, it is {DEFAULT_WINDOW}, and windows are not supported)")
    return config
