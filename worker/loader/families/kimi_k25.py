"""What a Kimi-K2.5's config.json says. Its language model is a DeepSeek-V3."""

from dataclasses import replace

from worker.loader.families.deepseek import DeepseekConfig, deepseek_v3_config
from worker.loader.families.nested import nested_config
from worker.loader.fields import Fields

PREFIXES = (("language_model.model.blocks.", "model.layers."), ("language_model.", ""))
"""Where `transformers` has saved the model, its layers are blocks."""
VISION = ("mm_projector.", "model.mm_projector.", "model.vision_tower.", "vision_tower.")


def kimi_k25_config(fields: Fields) -> DeepseekConfig:
    """Raises ModelConfigError."""
    fields.expect("model_type", "kimi_k25")
    config = nested_config(fields, deepseek_v3_config, is_tied=True)
    return replace(
        config,
        architecture="KimiK25ForConditionalGeneration",
        weight_prefixes=PREFIXES,
        skipped_weights=config.skipped_weights + VISION,
    )
