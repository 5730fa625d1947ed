"""What the config.json of a dense decoder says: attention with K and V per head, a gated MLP, RMS norms."""

from worker.loader.config import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY, ModelConfig
from worker.loader.fields import Fields
from worker.loader.hf_rope import hf_rope

DTYPES = ("float32", "bfloat16", "float16")


def dense_config(fields: Fields, architecture: str, model_type: str) -> ModelConfig:
    """What all these families share; biases and windows are each family's own affair. Raises ModelConfigError."""
    fields.expect("model_type", model_type)
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
        intermediate_size=fields.integer("intermediate_size", most=MAX_SIZE),
        vocab_size=fields.integer("vocab_size", most=MAX_VOCABULARY),
        max_model_len=max_model_len,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=hf_rope(fields, max_model_len),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=fields.text("dtype", fields.text("torch_dtype", "float32", one_of=DTYPES), one_of=DTYPES),
    )


def num_kv_heads(fields: Fields, key: str, num_heads: int) -> int:
    """As many as heads where the field is absent. Raises ModelConfigError."""
    number = fields.integer(key, num_heads, most=MAX_SIZE)
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


def expect_full_attention(fields: Fields) -> None:
    """Windows are not implemented. Raises ModelConfigError."""
    if fields.flag("use_sliding_window", True):
        fields.expect("sliding_window")
    else:
        fields.ignore("sliding_window", "max_window_layers")
    if set(fields.texts("layer_types", [])) - {"full_attention"}:
        raise fields.error("layer_types", "full_attention in every layer")
