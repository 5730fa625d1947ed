"""What the config.json of a dense decoder says: attention with K and V per head, a gated MLP, RMS norms."""

from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

from worker.loader.config import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY, ModelConfig
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope
from worker.loader.rope import RopeConfig

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28
"""What `transformers` takes where the fields are absent."""


def dense_config(
    fields: Fields,
    architecture: str,
    model_type: str,
    *,
    rope: RopeConfig | None = None,
    has_silu: bool = True,
    eps: float | None = None,
    has_mlp: bool = True,
) -> ModelConfig:
    """What all these families share; biases, windows and other activations than SiLU are each family's own affair, and
    `rope` is where it is not one for all layers, `eps` where the file need not say. Without `has_mlp` every layer has
    experts, and `intermediate_size` is 0. Raises ModelConfigError."""
    fields.expect("model_type", model_type)
    if has_silu:
        fields.expect("hidden_act", "silu", "swish")
    hidden_size = fields.integer("hidden_size", most=MAX_SIZE)
    num_heads = fields.integer("num_attention_heads", most=MAX_SIZE)
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    max_model_len = fields.integer("max_position_embeddings", most=MAX_CONTEXT)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(fields, "num_key_value_heads", num_heads),
        head_dim=head_dim(fields, "head_dim", hidden_size, num_heads),
        intermediate_size=fields.integer("intermediate_size", most=MAX_SIZE) if has_mlp else 0,
        vocab_size=fields.integer("vocab_size", most=MAX_VOCABULARY),
        max_model_len=max_model_len,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        rope=hf_rope(fields, max_model_len) if rope is None else rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32", one_of=DTYPES), one_of=DTYPES),
    )


def num_kv_heads(fields: Fields, key: str, num_heads: int, default: int | None = None) -> int:
    """As many as heads where the field is absent and there is no `default`. Raises ModelConfigError."""
    number = fields.integer(key, default or num_heads, most=MAX_SIZE)
    if num_heads % number:
        raise fields.error(key, f"a divisor of the {num_heads} attention heads")
    return number


def head_dim(fields: Fields, key: str, hidden_size: int, num_heads: int) -> int:
    """A share of the hidden state where the field is absent. Raises ModelConfigError."""
    if key not in fields and hidden_size % num_heads:
        raise fields.error(key, f"a number, as the {num_heads} heads are no divisor of the hidden size {hidden_size},")
    dim = fields.integer(key, hidden_size // num_heads, most=MAX_SIZE)
    if dim % 2:
        raise fields.error(key, "an even number")
    return dim


def extended(base: ModelConfig, kind: type[ConfigT], **more: Any) -> ConfigT:
    """The family's own dataclass with the fields of `base`, and what it has beside them."""
    return kind(**{field.name: getattr(base, field.name) for field in dataclass_fields(base)} | more)


def layer_types(fields: Fields, num_layers: int, default: list[str]) -> list[str]:
    """`full_attention` or `sliding_attention` of each layer. Raises ModelConfigError."""
    types = fields.texts("layer_types", default)
    if len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise fields.error("layer_types", f"{FULL} or {SLIDING} for each of the {num_layers} layers")
    return types


def layer_windows(fields: Fields, types: list[str], window: int | None, max_model_len: int) -> tuple[int | None, ...]:
    """Of each layer; empty where none hides anything. Raises ModelConfigError."""
    if SLIDING not in types or (window is not None and window >= max_model_len):
        return ()
    if window is None:
        raise fields.error("sliding_window", "a number, as there are layers of sliding_attention,")
    return tuple(window if kind == SLIDING else None for kind in types)


def same_windows(fields: Fields, window: int | None, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    """Of layers that all have this window, or none. Raises ModelConfigError."""
    types = [FULL if window is None else SLIDING] * num_layers
    if layer_types(fields, num_layers, types) != types:
        raise fields.error("layer_types", f"{types[0]} in every layer, as sliding_window says,")
    return layer_windows(fields, types, window, max_model_len)


def qwen_windows(fields: Fields, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    """Of Qwen2 and Qwen3: layers from `max_window_layers` on, where `use_sliding_window` says so."""
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", DEFAULT_WINDOW)
    else:
        fields.ignore("sliding_window")
    first = fields.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
    default = [SLIDING if window is not None and i >= first else FULL for i in range(num_layers)]
    return layer_windows(fields, layer_types(fields, num_layers, default), window, max_model_len)


def expect_full_attention(fields: Fields) -> None:
    """Windows are not implemented. Raises ModelConfigError."""
    if fields.flag("use_sliding_window", True):
        fields.expect("sliding_window")
    else:
        fields.ignore("sliding_window", "max_window_layers")
    if set(fields.texts("layer_types", [])) - {"full_attention"}:
        raise fields.error("layer_types", "full_attention in every layer")
