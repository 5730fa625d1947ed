"""What the config.json of a Gemma 3 that also sees (4B and larger) says of its language model."""

from worker.loader.families.gemma3 import DEFAULT_HEAD_DIM, Gemma3Config, gemma3_config
from worker.loader.families.nested import Whole, nested_config
from worker.loader.fields import Fields

DEFAULTS = {
    "head_dim": DEFAULT_HEAD_DIM, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 262208,
}  # fmt: skip
"""Published files leave out what `transformers` takes by default."""
WHOLE = Whole(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    weight_prefixes=(("language_model.", ""),),
    other_weights=("multi_modal_projector.", "vision_tower."),
    is_tied=True,
)


def gemma3_vision_config(fields: Fields) -> Gemma3Config:
    """Raises ModelConfigError."""
    config = nested_config(fields, gemma3_config, WHOLE, DEFAULTS)
    # `transformers` reads it in models of text alone.
    fields.section("text_config").expect("final_logit_softcapping")
    return config
