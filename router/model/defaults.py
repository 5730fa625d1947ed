"""Sampling defaults: what the model's generation_config.json recommends, then our own.

`do_sample` is not looked at, as in vLLM: a request without a temperature samples unless the model's temperature is 0.
`max_new_tokens` is not, either: a completion may use what the context leaves.
"""

import logging
from collections.abc import Mapping

from common import bounds
from fissile.v1 import SamplingParams

logger = logging.getLogger(__name__)

_RECOMMENDED: Mapping[str, bounds.Range] = {
    "temperature": bounds.TEMPERATURE,
    "top_k": bounds.TOP_K,
    "top_p": bounds.TOP_P,
    "min_p": bounds.MIN_P,
    "repetition_penalty": bounds.REPETITION_PENALTY,
}


def default_sampling(generation_config: Mapping[str, object]) -> SamplingParams:
    """Everything that has a default, so without seed. What is invalid in the file is named in the log and not used."""
    values = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )
    ignored = []
    for name in _RECOMMENDED:
        value = generation_config.get(name)
        if value is None:
            continue
        if _is_valid(name, value):
            setattr(values, name, value)
        else:
            ignored.append(f"{name} = {value!r}")
    if ignored:
        logger.warning("generation_config.json: ignored %s", ", ".join(ignored))
    return values


def _is_valid(name: str, value: object) -> bool:
    kind = int if name == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not -(2**31) <= value < 2**31:
        return False
    return value in _RECOMMENDED[name]
