"""What the fields of a request may hold: the one table that router and worker check against.

A worker does not trust routers, so it checks the same again. Where a router adds to what a client asked, the bound of
the wire is named for it (`…_ON_WIRE`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fissile.v1 import SamplingParams


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers in [low, high], or in (low, high] with `above_low`. NaN is in none."""

    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        return value <= self.high and (value > self.low if self.above_low else value >= self.low)


TEMPERATURE = Range(0, 100)
TOP_K = Range(-1)
TOP_P = Range(0, 1, above_low=True)
MIN_P = Range(0, 1)
PRESENCE_PENALTY = Range(-2, 2)
FREQUENCY_PENALTY = Range(-2, 2)
REPETITION_PENALTY = Range(0, 2, above_low=True)
BIAS = Range(-100, 100)
NUM_LOGPROBS = Range(0, 64)
BEAM_WIDTH = Range(2, 16)
N = Range(1, 128)
MAX_TOKENS = Range(1)
MAX_FANOUT_TOKENS = 8 * 1024 * 1024
"""Prompt tokens × n of one request: a worker keeps the prompt with each completion."""

MAX_PROMPTS = 256
MAX_BIASES = 1024
MAX_BAD_SEQUENCES = 256
MAX_BAD_SEQUENCE_TOKENS = 32
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 1024
MAX_BAD_WORD_TOKENS = 128
MAX_BAD_WORD_SPELLINGS = 4
"""Token sequences of one bad word."""
MAX_BAD_SEQUENCES_ON_WIRE = MAX_BAD_SEQUENCES + MAX_BAD_WORDS * MAX_BAD_WORD_SPELLINGS
MAX_BAD_SEQUENCE_TOKENS_ON_WIRE = max(MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_WORD_TOKENS)
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_STOP_TOKENS_ON_WIRE = MAX_STOP_TOKENS + MAX_STOPS
"""A stop string that is a special token travels as that token."""
MAX_STOP_SEQUENCES = 64
MAX_STOP_SEQUENCE_TOKENS = 256
MAX_GRAMMAR_BYTES = 1024 * 1024
MAX_CHOICES = 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_TOOLS = 1024
MAX_MESSAGES = 16_384
MAX_TOOL_CALLS = 16_384
MAX_SALT_BYTES = 256
MAX_ROUTING_KEY_BYTES = 256
MAX_REQUEST_ID_CHARACTERS = 128
MIN_HEARTBEAT_SECONDS = 0.01

NEUTRAL_TO_BEAMS: Mapping[str, float | None] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "banned_token_ids": None,
    "bad_token_sequences": None,
    "num_logprobs": None,
    "num_prompt_logprobs": None,
    "structured_output": None,
}
"""Fields that cannot go with beam search, and the one value that may. Hypotheses are compared by the model's own
probabilities, so nothing may change these."""


def excluded_by_beams(sampling: SamplingParams) -> list[str]:
    """What is set of those fields."""
    fields = [(field.name, value) for field, value in sampling.ListFields()]
    return [name for name, value in fields if name in NEUTRAL_TO_BEAMS and value != NEUTRAL_TO_BEAMS[name]]
