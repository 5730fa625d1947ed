"""What a dense Qwen3's config.json says."""

from dataclasses import replace

from worker.loader.config import ModelConfig
from worker.loader.families.dense import dense_config, qwen_windows
from worker.loader.fields import Fields

DEFAULT_HEAD_DIM = 128
"""What `transformers` takes where the field is absent; no share of the hidden state."""


def qwen3_config(fields: Fields) -> ModelConfig:
    """Raises ModelConfigError."""
    config = dense_config(fields, "Qwen3ForCausalLM", "qwen3")
    return replace(
        config,
        head_dim=config.head_dim if "head_dim" in fields else DEFAULT_HEAD_DIM,
        attention_bias=fields.flag("attention_bias", False),
        windows=qwen_windows(fields, config.num_layers, config.max_model_len),
    )
