"""What a Mistral's config.json says."""

from dataclasses import replace

from worker.loader.config import ModelConfig
from worker.loader.families.dense import DEFAULT_WINDOW, dense_config, same_windows
from worker.loader.fields import Fields


def mistral_config(fields: Fields) -> ModelConfig:
    """Raises ModelConfigError."""
    config = dense_config(fields, "MistralForCausalLM", "mistral")
    windows = same_windows(fields, mistral_window(fields), config.num_layers, config.max_model_len)
    return replace(config, windows=windows)


def mistral_window(fields: Fields) -> int | None:
    """null means that there is none, an absent field the one that `transformers` takes. Raises ModelConfigError."""
    if fields.mentions("sliding_window") and "sliding_window" not in fields:
        return None
    return fields.integer("sliding_window", DEFAULT_WINDOW)
