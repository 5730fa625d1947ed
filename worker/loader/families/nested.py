"""The language model in a model that also sees or hears: its configuration is an object inside of the whole's, and so
are, by their names, its weights. The rest is left out: workers are sent text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from worker.loader.config import ModelConfig
from worker.loader.decoder_fields import read_decoder
from worker.loader.families.dense import DTYPES
from worker.loader.fields import Fields
from worker.loader.quantized.config import SECTIONS

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
_OF_OTHER_INPUTS = (
    "audio_config", "audio_ms_per_token", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id",
    "boi_token_id", "boi_token_index", "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index",
    "ignore_index", "image_token_id", "image_token_index", "media_placeholder_token_id", "mm_tokens_per_image",
    "projection_hidden_size", "projection_layer_norm_eps", "use_unified_vision_chunk", "video_placeholder",
    "video_token_id", "vision_config", "vision_end_token_id", "vision_soft_tokens_per_image",
    "vision_soft_tokens_per_video_frame", "vision_start_token_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A kind of model around a language model."""

    architecture: str
    model_type: str
    weight_prefixes: tuple[tuple[str, str], ...]
    """As in `ModelConfig`."""
    other_weights: tuple[str, ...]
    """Beginnings of names, as in the model, of what is not the language model's."""
    is_tied: bool
    """Embedding and head are one where the file does not say."""


def nested_config(
    fields: Fields,
    parse: Callable[[Fields], ConfigT],
    whole: Whole,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> ConfigT:
    """`parse` reads the language model's own fields, or `defaults` in place of those that are absent. Raises
    ModelConfigError."""
    fields.expect("model_type", whole.model_type)
    text = fields.section("text_config").with_defaults(defaults)
    text.ignore("architectures")
    fields.ignore(*_OF_OTHER_INPUTS)
    config = read_decoder(text, parse)
    if config.quantized is not None:
        for section in SECTIONS:
            fields.expect(section)
    return replace(
        config,
        architecture=whole.architecture,
        weight_prefixes=whole.weight_prefixes,
        skipped_weights=config.skipped_weights + whole.other_weights,
        tie_word_embeddings=fields.flag("tie_word_embeddings", whole.is_tied),
        dtype=fields.text("dtype", fields.text("torch_dtype", config.dtype, one_of=DTYPES), one_of=DTYPES),
    )
