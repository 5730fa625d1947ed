"""From the metadata of a GGUF file to a `ModelConfig`, read as llama.cpp reads it. No torch."""

from pathlib import Path

from worker.loader.config import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, ModelConfig
from worker.loader.ending_tokens import ending_tokens
from worker.loader.errors import UnknownArchitectureError, WeightsError
from worker.loader.families.dense import head_dim, num_kv_heads
from worker.loader.fields import Fields
from worker.loader.gguf.families import ARCHITECTURE, FAMILIES
from worker.loader.gguf.file import GGUFFile
from worker.loader.gguf.gemma3 import gemma3_from_gguf
from worker.loader.gguf.moe import glm4_moe_from_gguf, qwen3_moe_from_gguf
from worker.loader.gguf.parts import read_gguf_parts
from worker.loader.gguf.types import TensorType
from worker.loader.rope import YARN_BETA_FAST, YARN_BETA_SLOW, RopeConfig, YarnScaling, yarn_attention_factor

TOKENIZER = "tokenizer.ggml."
EMBEDDING, HEAD, ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
ENDING_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ENDING_TEXTS = frozenset({
    "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_turn>", "<end_of_utterance>", "<|call|>", "<|calls|>",
    "<|end_of_text|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|flush|>", "<|im_end|>",
    "<|return|>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Tokens that end a text or a turn wherever they occur, whether the metadata say so or not."""
HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout", "pooling_type", "expert_used_count", "vocab_size")
"""Below the architecture's name: fields that say nothing new, or nothing about a decoder."""


def load_gguf_config(path: Path) -> ModelConfig:
    """Raises ModelConfigError, or WeightsError for damaged files."""
    return config_from_gguf(read_gguf_parts(path), path.name)


def config_from_gguf(file: GGUFFile, name: str) -> ModelConfig:
    """`name` of the file stands in messages. Raises ModelConfigError or WeightsError."""
    fields = Fields(file.metadata, name)
    kind = fields.text(ARCHITECTURE, "")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownArchitectureError(
            f"GGUF architecture {kind!r} is not supported; known: {known}. Where the model has a directory with "
            "config.json and *.safetensors, --model-impl transformers may run that"
        )
    fields.expect("general.type", "model")
    fields.expect(f"{kind}.attention.causal", True)
    for key in ("attention.clamp_kqv", "attention.max_alibi_bias"):
        fields.expect(f"{kind}.{key}", 0)
    hidden_size = fields.integer(f"{kind}.embedding_length", most=MAX_SIZE)
    num_heads = fields.integer(f"{kind}.attention.head_count", most=MAX_SIZE)
    dim = head_dim(fields, f"{kind}.attention.key_length", hidden_size, num_heads)
    fields.expect(f"{kind}.attention.value_length", dim)
    vocab_size = _vocab_size(file)
    eos_token_ids, remarks = _endings(fields, vocab_size)
    config = ModelConfig(
        architecture=FAMILIES[kind].architecture,
        hidden_size=hidden_size,
        num_layers=fields.integer(f"{kind}.block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(fields, f"{kind}.attention.head_count_kv", num_heads),
        head_dim=dim,
        intermediate_size=fields.integer(f"{kind}.feed_forward_length", most=MAX_SIZE),
        vocab_size=vocab_size,
        max_model_len=fields.integer(f"{kind}.context_length", most=MAX_CONTEXT),
        rms_norm_eps=fields.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, f"{kind}.rope.", _divisors(file, dim)),
        qkv_bias=FAMILIES[kind].has_qkv_bias,
        tie_word_embeddings=HEAD not in file.tensors,
        eos_token_ids=eos_token_ids,
        remarks=remarks,
    )
    config = _of_family(fields, kind, config, file)
    fields.refuse_unread({f"{kind}.{key}" for key in HARMLESS}, f"{kind}.")
    return config


def _of_family(fields: Fields, kind: str, config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """With what only some families have, which the others must not."""
    if kind == "gemma3":
        config = gemma3_from_gguf(fields, config)
    else:
        fields.expect(f"{kind}.attention.sliding_window", 0)
    if kind == "glm4moe":
        return glm4_moe_from_gguf(fields, config, file.tensors)
    fields.expect(f"{kind}.rope.dimension_count", config.head_dim)
    if kind == "qwen3moe":
        return qwen3_moe_from_gguf(fields, config)
    fields.expect(f"{kind}.expert_count", 0)
    return config


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: whatever `vocab_size` or the list of tokens say, there are no other tokens."""
    if EMBEDDING not in file.tensors:
        raise WeightsError(f"the GGUF file has no tensor {EMBEDDING}")
    return file.tensors[EMBEDDING].shape[0]


def _endings(fields: Fields, vocab_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    ids, remarks = ending_tokens([(fields, TOKENIZER + key) for key in ENDING_KEYS], vocab_size)
    tokens = fields.texts(f"{TOKENIZER}tokens", [])[:vocab_size]
    named = tuple(i for i, text in enumerate(tokens) if text in ENDING_TEXTS and i not in ids)
    return ids + named, remarks


def _rope(fields: Fields, prefix: str, divisors: tuple[float, ...]) -> RopeConfig:
    """A factor means nothing without the type beside it, which is linear where the file does not say."""
    theta = fields.number(f"{prefix}freq_base", 10000.0, above=1)
    kind = fields.text(f"{prefix}scaling.type", "linear", one_of=("none", "linear", "yarn"))
    older = fields.number(f"{prefix}scale_linear", 0.0, or_zero=True)
    factor = fields.number(f"{prefix}scaling.factor", older, or_zero=True)
    if kind == "none" or factor == 0:
        factor = 1.0
    attention_factor = fields.number(f"{prefix}scaling.attn_factor", 1.0)
    context = fields.integer(f"{prefix.removesuffix('rope.')}context_length", most=MAX_CONTEXT)
    scaling = YarnScaling(
        factor=factor,
        original_max_position=fields.integer(f"{prefix}scaling.original_context_length", context, most=MAX_CONTEXT),
        beta_fast=fields.number(f"{prefix}scaling.yarn_beta_fast", YARN_BETA_FAST),
        beta_slow=fields.number(f"{prefix}scaling.yarn_beta_slow", YARN_BETA_SLOW),
    )
    fields.expect(f"{prefix}scaling.yarn_log_multiplier", 0)
    if kind == "yarn":
        attention_factor *= yarn_attention_factor(factor)
        return RopeConfig(theta, yarn=scaling, frequency_divisors=divisors, attention_factor=attention_factor)
    return RopeConfig(theta, factor, frequency_divisors=divisors, attention_factor=attention_factor)


def _divisors(file: GGUFFile, dim: int) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return ()
    if tensor.shape != (dim // 2,):
        raise WeightsError(f"tensor {ROPE_DIVISORS}: its shape is {tensor.shape}, the model expects {(dim // 2,)}")
    if tensor.type is not TensorType.F32:
        raise WeightsError(f"tensor {ROPE_DIVISORS} is stored as {tensor.type.name}; F32 is needed")
    divisors = tuple(tensor.data.cast("f").tolist())
    if not all(0 < divisor < float("inf") for divisor in divisors):
        raise WeightsError(f"tensor {ROPE_DIVISORS}: all its values must be positive")
    return divisors
