"""What the config.json of a Gemma 4 that also sees, and perhaps hears, says of its language model."""

from worker.loader.families.gemma4 import Gemma4Config, gemma4_config
from worker.loader.families.nested import Whole, nested_config
from worker.loader.fields import Fields

WHOLE = Whole(
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    weight_prefixes=(("model.language_model.", "model."),),
    other_weights=("model.audio_tower.", "model.embed_audio.", "model.embed_vision.", "model.vision_tower."),
    is_tied=True,
)


def gemma4_vision_config(fields: Fields) -> Gemma4Config:
    """Raises ModelConfigError."""
    return nested_config(fields, gemma4_config, WHOLE)
