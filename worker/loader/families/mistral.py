"""What a Mistral's config.json says."""

from dataclasses import replace

from worker.loader.config import ModelConfig
from worker.loader.families.dense import DEFAULT_WINDOW, FULL, SLIDING, dense_config, layer_types, layer_windows
from worker.loader.fields import Fields


def mistral_config(fields: Fields) -> ModelConfig:
    """Raises ModelConfigError."""
    config = dense_config(fields, "MistralForCausalLM", "mistral")
    window = mistral_window(fields)
    default = [FULL if window is None else SLIDING] * config.num_layers
    if layer_types(fields, config.num_layers, default) != default:
        raise fields.error("layer_types", f"{default[0]} in every layer, as sliding_window says,")
    return replace(config, windows=layer_windows(fields, default, window, config.max_model_len))


def mistral_window(fields: Fields) -> int | None:
    """null means that there is none, an absent field the one that `transformers` takes. Raises ModelConfigError."""
    if fields.mentions("sliding_window") and "sliding_window" not in fields:
        return None
    return fields.integer("sliding_window", DEFAULT_WINDOW)
