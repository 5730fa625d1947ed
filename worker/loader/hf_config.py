"""From a directory's config.json and generation_config.json to a `ModelConfig`.

A family reads its fields; every other field must be known to be harmless. A field that changes what the model computes
and is not implemented is an error, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from worker.loader.config import CommonConfig, ModelConfig
from worker.loader.decoder_fields import read_decoder
from worker.loader.ending_tokens import ending_tokens
from worker.loader.errors import ModelConfigError, UnknownArchitectureError
from worker.loader.families.registry import FAMILIES
from worker.loader.fields import Fields, read_json
from worker.loader.quantized.config import SECTIONS
from worker.loader.told_tokens import CONFIG as TOKENIZER_CONFIG
from worker.loader.told_tokens import id_of_role

ConfigT = TypeVar("ConfigT", bound=CommonConfig)
CONFIG, GENERATION = "config.json", "generation_config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where quantisers put what config.json should say."""

FALLBACK = "Most other decoders of `transformers` run with --model-impl transformers, slower"
_NOT_FOLLOWED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],), "constraints": ([],), "diversity_penalty": (0,), "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "exponential_decay_length_penalty": (), "force_words_ids": ([],), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "guidance_scale": (1,), "max_time": (), "min_length": (0,), "no_repeat_ngram_size": (0,),
    "num_beams": (1,), "num_return_sequences": (1,), "penalty_alpha": (0,), "token_healing": (False,), "top_h": (1,),
    "typical_p": (1,), "watermarking_config": (),
}  # fmt: skip
"""Of generation_config.json: what would change an answer of `transformers` and is done neither here nor, for requests
that do not ask for it, by a router; with the values that change nothing."""


def load_hf_config(directory: Path) -> ModelConfig:
    """Raises ModelConfigError."""
    config = config_from_hf(read_json(directory / CONFIG), read_json(directory / GENERATION, optional=True))
    for name in QUANTIZATION_FILES:
        if config.quantized is None and (directory / name).is_file():
            raise ModelConfigError(f"{name} says that weights are quantised; {CONFIG} has to say it: {SECTIONS[0]}")
    return with_tokenizers_ending(config, directory)


def config_from_hf(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """From the contents of both files; `generation` is {} when there is none. Raises ModelConfigError."""
    fields = Fields(config, CONFIG)
    return with_advice(read_decoder(fields, _family(fields)), Fields(generation, GENERATION))


def with_advice(model: ConfigT, advice: Fields) -> ConfigT:
    """With what the fields of generation_config.json add. Raises ModelConfigError."""
    eos_token_ids, remarks = ending_tokens([(advice, "eos_token_id")], model.vocab_size)
    if found := [key for key, neutral in _NOT_FOLLOWED.items() if not advice.is_one_of(key, *neutral)]:
        remarks += (f"{GENERATION}: not followed: {', '.join(found)}",)
    return replace(
        model,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids + model.eos_token_ids)),
        remarks=remarks + model.remarks,
    )


def with_tokenizers_ending(model: ConfigT, directory: Path) -> ConfigT:
    """With the token that the tokenizer calls `eos_token`: of a model that was taught to end its turns by another one
    than it ended texts by, often that file alone says so."""
    role = "eos_token"
    found = Fields({role: id_of_role(directory, role)}, TOKENIZER_CONFIG)
    eos_token_ids, remarks = ending_tokens([(found, role)], model.vocab_size)
    return replace(
        model,
        eos_token_ids=tuple(dict.fromkeys(model.eos_token_ids + eos_token_ids)),
        remarks=model.remarks + remarks,
    )


def _family(fields: Fields) -> Callable[[Fields], ModelConfig]:
    names = fields.texts("architectures", [])
    if not names:
        raise UnknownArchitectureError(f"{CONFIG} names no architecture (`architectures`)")
    if names[0] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownArchitectureError(f"architecture {names[0]!r} is not supported; known: {known}. {FALLBACK}")
    return FAMILIES[names[0]]
