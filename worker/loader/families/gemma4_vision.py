"""What the config.json of a Gemma 4 that also sees, and perhaps hears, says of its language model."""

from dataclasses import replace

from worker.loader.families.gemma4 import Gemma4Config, gemma4_config
from worker.loader.families.nested import nested_config
from worker.loader.fields import Fields

PREFIXES = (("model.language_model.", "model."),)
OTHER_INPUTS = ("model.audio_tower.", "model.embed_audio.", "model.embed_vision.", "model.vision_tower.")


def gemma4_vision_config(fields: Fields) -> Gemma4Config:
    """Raises ModelConfigError."""
    fields.expect("model_type", "gemma4")
    config = nested_config(fields, gemma4_config, is_tied=True)
    return replace(
        config,
        architecture="Gemma4ForConditionalGeneration",
        weight_prefixes=PREFIXES,
        skipped_weights=config.skipped_weights + OTHER_INPUTS,
    )
