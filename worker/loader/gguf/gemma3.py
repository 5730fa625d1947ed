"""What the metadata of a GGUF file say of a Gemma 3 beyond those of a dense decoder. No torch."""

from worker.loader.config import ModelConfig
from worker.loader.families.dense import extended
from worker.loader.families.gemma3 import DEFAULT_PATTERN, LOCAL_THETA, Gemma3Config
from worker.loader.fields import Fields
from worker.loader.rope import RopeConfig

LAYERS_OF_27B = 62


def gemma3_from_gguf(fields: Fields, base: ModelConfig) -> Gemma3Config:
    """Neither the pattern of windows nor the angles of layers that have one are in the file, nor is what the scores of
    the 27B model are scaled by: all are llama.cpp's constants. Raises ModelConfigError."""
    window = fields.integer("gemma3.attention.sliding_window")
    is_local = tuple((layer + 1) % DEFAULT_PATTERN != 0 for layer in range(base.num_layers))
    hides = window < base.max_model_len
    is_27b = base.num_layers == LAYERS_OF_27B
    return extended(
        base,
        Gemma3Config,
        local_rope=RopeConfig(LOCAL_THETA),
        is_local=is_local,
        query_scalar=base.hidden_size / base.num_heads if is_27b else base.head_dim,
        logit_soft_cap=None,
        windows=tuple(window if local else None for local in is_local) if hides else (),
    )
