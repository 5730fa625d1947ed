"""What a Qwen2's or a Qwen2.5's config.json says."""

from dataclasses import replace

from worker.loader.config import ModelConfig
from worker.loader.families.dense import dense_config, qwen_windows
from worker.loader.fields import Fields


def qwen2_config(fields: Fields) -> ModelConfig:
    """Queries, keys and values always have biases. Raises ModelConfigError."""
    config = dense_config(fields, "Qwen2ForCausalLM", "qwen2")
    return replace(config, qkv_bias=True, windows=qwen_windows(fields, config.num_layers, config.max_model_len))
