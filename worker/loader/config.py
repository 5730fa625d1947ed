"""`ModelConfig`: what a model is, from a Hugging Face config.json or from GGUF metadata. No torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.loader.errors import ModelConfigError, UnknownArchitectureError
from worker.loader.source import ModelSource, SourceFormat

GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""`general.architecture` of a GGUF file → architecture name of its Hugging Face twin."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    linear_factor: float = 1.0
    """All positions are divided by this ("linear" scaling)."""
    llama3: Llama3Scaling | None = None
    frequency_divisors: tuple[float, ...] = ()
    """GGUF's form of a scaling, worked out per frequency: head_dim / 2 values, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    """What the checkpoint is stored in, as far as it says; quantised ones count as float32."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a sequence: those of generation_config.json and of config.json."""


def load_model_config(source: ModelSource) -> ModelConfig:
    """Raises ModelConfigError (also when a field is missing) or WeightsError (damaged GGUF)."""
    if source.format is SourceFormat.GGUF:
        from worker.loader.gguf_file import read_gguf

        file = read_gguf(source.path)
        factors = file.tensors.get("rope_freqs.weight")
        divisors = tuple(factors.rows(0, 1)[0].tolist()) if factors else ()
        return config_from_gguf(file.metadata, "output.weight" not in file.tensors, divisors)
    config = read_json(source.path / "config.json")
    return config_from_hf(config, read_json(source.path / "generation_config.json", optional=True))


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in `path`; {} when the file is `optional` and absent. Raises ModelConfigError."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return value


def config_from_hf(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """From the contents of config.json and generation_config.json ({} when there is none)."""
    architectures = config.get("architectures") or []
    if not architectures:
        raise UnknownArchitectureError("config.json names no architecture (`architectures`)")
    try:
        if config.get("hidden_act", "silu") != "silu":
            raise ModelConfigError(f"activation {config['hidden_act']!r} is not supported (silu is)")
        return ModelConfig(
            architecture=architectures[0],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_model_len=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
            rope=_hf_rope(config),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            bos_token_id=_first(config.get("bos_token_id")),
            eos_token_ids=_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
        )
    except KeyError as error:
        raise ModelConfigError(f"config.json lacks {error}") from None


def config_from_gguf(metadata: dict[str, Any], tied: bool, divisors: tuple[float, ...] = ()) -> ModelConfig:
    """From a GGUF file's metadata. `tied`: the file has no `output.weight`; `divisors`: its `rope_freqs`."""
    kind = metadata.get("general.architecture", "")
    if kind not in GGUF_ARCHITECTURES:
        raise UnknownArchitectureError(
            f"GGUF architecture {kind!r} is not supported; known: {', '.join(sorted(GGUF_ARCHITECTURES))}"
        )
    tokenizer = "tokenizer.ggml."
    try:
        hidden_size, num_heads = metadata[f"{kind}.embedding_length"], metadata[f"{kind}.attention.head_count"]
        return ModelConfig(
            architecture=GGUF_ARCHITECTURES[kind],
            hidden_size=hidden_size,
            num_layers=metadata[f"{kind}.block_count"],
            num_heads=num_heads,
            num_kv_heads=metadata.get(f"{kind}.attention.head_count_kv", num_heads),
            head_dim=metadata.get(f"{kind}.attention.key_length", hidden_size // num_heads),
            intermediate_size=metadata[f"{kind}.feed_forward_length"],
            vocab_size=metadata.get(f"{kind}.vocab_size") or len(metadata[f"{tokenizer}tokens"]),
            max_model_len=metadata[f"{kind}.context_length"],
            rms_norm_eps=metadata[f"{kind}.attention.layer_norm_rms_epsilon"],
            rope=RopeConfig(
                theta=metadata.get(f"{kind}.rope.freq_base", 10000.0),
                linear_factor=metadata.get(f"{kind}.rope.scaling.factor", 1.0),
                frequency_divisors=divisors,
            ),
            tie_word_embeddings=tied,
            bos_token_id=metadata.get(f"{tokenizer}bos_token_id"),
            eos_token_ids=_ids(metadata.get(f"{tokenizer}eos_token_id"), metadata.get(f"{tokenizer}eot_token_id")),
        )
    except KeyError as error:
        raise ModelConfigError(f"the GGUF metadata lacks {error}") from None


def _hf_rope(config: dict[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older files)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=rope["factor"])
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position=rope["original_max_position_embeddings"],
        )
        return RopeConfig(theta, llama3=scaling)
    raise ModelConfigError(f"rope type {kind!r} is not supported (default, linear and llama3 are)")


def rope_frequencies(rope: RopeConfig, head_dim: int) -> list[float]:
    """The head_dim / 2 angular frequencies, in radians a position, after scaling.

    llama3: wavelengths shorter than original / high_freq_factor stay, longer than original / low_freq_factor are
    stretched by `factor`, those between are interpolated (Llama 3.1's reference code).
    """
    plain = [rope.theta ** (-2 * i / head_dim) / rope.linear_factor for i in range(head_dim // 2)]
    if rope.frequency_divisors:
        return [frequency / divisor for frequency, divisor in zip(plain, rope.frequency_divisors, strict=True)]
    if rope.llama3 is None:
        return plain
    scaling = rope.llama3
    stretched = []
    for frequency in plain:
        turns = scaling.original_max_position * frequency / (2 * math.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(smooth, 0.0), 1.0)
        stretched.append(frequency * (kept + (1 - kept) / scaling.factor))
    return stretched


def _first(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) else value


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))
