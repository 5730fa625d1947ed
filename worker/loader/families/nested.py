"""The language model in a model that also sees or hears: its configuration is an object inside of the whole's, and so
are, by their names, its weights. The rest is left out: workers are sent text."""

from collections.abc import Callable, Mapping
from dataclasses import replace
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


def nested_config(
    fields: Fields,
    parse: Callable[[Fields], ConfigT],
    *,
    is_tied: bool,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> ConfigT:
    """`parse` reads the language model's own fields, or `defaults` in place of those that are absent. `is_tied`:
    embedding and head are one where the whole does not say. Raises ModelConfigError."""
    text = fields.section("text_config").with_defaults(defaults)
    text.ignore("architectures")
    fields.ignore(*_OF_OTHER_INPUTS)
    config = read_decoder(text, parse)
    if config.quantized is not None:
        for section in SECTIONS:
            fields.expect(section)
    return replace(
        config,
        tie_word_embeddings=fields.flag("tie_word_embeddings", is_tied),
        dtype=fields.text("dtype", fields.text("torch_dtype", config.dtype, one_of=DTYPES), one_of=DTYPES),
    )
