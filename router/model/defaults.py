"""Defaults of requests: what the model's generation_config.json recommends, then our own.

`do_sample` is not looked at, as in vLLM: a request without a temperature samples unless the model's temperature is 0.
`max_new_tokens` is not, either: a completion may use what the context leaves. What else that file may say and nobody
here does, workers name in their logs.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeGuard

from common import bounds
from common.faults import shown
from fissile.v1 import LogitBias, SamplingParams, TokenSequence

logger = logging.getLogger(__name__)

MAX_BANNED: Final = 1024
"""Tokens of `suppress_tokens`: they travel with each request."""
_MAX_ID: Final = 2**32 - 1
_NUMBERS: Final = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for requests that do not say otherwise."""

    sampling: SamplingParams
    """Everything that has a default, so without seed; token ids may be beyond the model's vocabulary."""
    stop: tuple[str, ...] = ()
    min_tokens: int = 0


def read_defaults(generation_config: Mapping[str, object]) -> Defaults:
    """What is invalid in the file is named in the log and not used."""
    values = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )
    found = _valid(generation_config)
    for name in found.keys() & _NUMBERS:
        setattr(values, name, found[name])
    values.logit_bias.extend(LogitBias(token_id=ids[0], bias=bias) for ids, bias in found.get("sequence_bias", ()))
    values.banned_token_ids.extend(found.get("suppress_tokens", ()))
    values.bad_token_sequences.extend(TokenSequence(token_ids=ids) for ids in found.get("bad_words_ids", ()))
    stop = found.get("stop_strings", ())
    return Defaults(values, (stop,) if isinstance(stop, str) else tuple(stop), found.get("min_new_tokens", 0))


def _valid(generation_config: Mapping[str, object]) -> dict[str, Any]:
    valid, ignored = {}, []
    for name, is_valid in _CHECKS.items():
        value = generation_config.get(name)
        if value is None:
            continue
        if is_valid(value):
            valid[name] = value
        else:
            ignored.append(shown(f"{name} = {value!r}"))
    if ignored:
        logger.warning("generation_config.json: ignored %s", ", ".join(ignored))
    return valid


def _is_number_in(allowed: bounds.Range, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -(2**31) <= value < 2**31 and value in allowed


def _is_token_id(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_ID


def _are_token_ids(value: object, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(map(_is_token_id, value))


def _are_stops(value: object) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= bounds.MAX_STOPS
        and all(_is_text(stop) and 1 <= len(stop) <= bounds.MAX_STOP_CHARACTERS for stop in stops)
    )


def _is_text(value: object) -> TypeGuard[str]:
    """JSON may hold halves of surrogate pairs, which no message can."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _are_bad_sequences(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= bounds.MAX_BAD_SEQUENCES
        and all(ids and _are_token_ids(ids, bounds.MAX_BAD_SEQUENCE_TOKENS) for ids in value)
    )


def _are_biases(value: object) -> bool:
    """Pairs of a sequence and a number, as `transformers` saves them; only single tokens can have one here."""
    if not isinstance(value, list) or len(value) > bounds.MAX_BIASES:
        return False
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return False
    if not all(_are_token_ids(ids, 1) and ids and _is_number_in(bounds.BIAS, bias) for ids, bias in value):
        return False
    return len({ids[0] for ids, _ in value}) == len(value)


_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "temperature": partial(_is_number_in, bounds.TEMPERATURE),
    "top_k": lambda value: type(value) is int and _is_number_in(bounds.TOP_K, value),
    "top_p": partial(_is_number_in, bounds.TOP_P),
    "min_p": partial(_is_number_in, bounds.MIN_P),
    "repetition_penalty": partial(_is_number_in, bounds.REPETITION_PENALTY),
    "stop_strings": _are_stops,
    "min_new_tokens": lambda value: type(value) is int and _is_number_in(bounds.Range(0), value),
    "bad_words_ids": _are_bad_sequences,
    "suppress_tokens": partial(_are_token_ids, most=MAX_BANNED),
    "sequence_bias": _are_biases,
}
