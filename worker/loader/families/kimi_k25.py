"""What a Kimi-K2.5's config.json says. Its language model is a DeepSeek-V3."""

from worker.loader.families.deepseek import DeepseekConfig, deepseek_v3_config
from worker.loader.families.nested import Whole, nested_config
from worker.loader.fields import Fields

WHOLE = Whole(
    architecture="KimiK25ForConditionalGeneration",
    model_type="kimi_k25",
    # Where `transformers` has saved the model, its layers are blocks.
    weight_prefixes=(("language_model.model.blocks.", "model.layers."), ("language_model.", "")),
    other_weights=("mm_projector.", "model.mm_projector.", "model.vision_tower.", "vision_tower."),
    is_tied=True,
)


def kimi_k25_config(fields: Fields) -> DeepseekConfig:
    """Raises ModelConfigError."""
    return nested_config(fields, deepseek_v3_config, WHOLE)
