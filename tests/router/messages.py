"""Random valid messages, for hypothesis. Every field of the contract is in here; a new one makes the tests fail."""

import json

from hypothesis import strategies as st

from fissile.v1 import (
    BeamSearch,
    Choice,
    GenerationOptions,
    LogitBias,
    OutputOptions,
    SamplingParams,
    StructuredOutput,
    TokenSequence,
)

VOCAB_SIZE = 400

token_ids = st.integers(0, VOCAB_SIZE - 1)
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


def floats(low, high, **border):
    return st.floats(low, high, width=32, allow_nan=False, **border)


def lists(elements, **sizes):
    return st.lists(elements, max_size=4, **sizes)


sequences = st.builds(TokenSequence, token_ids=st.lists(token_ids, min_size=1, max_size=5))
biases = st.builds(LogitBias, token_id=token_ids, bias=floats(-100, 100))
constraints = st.one_of(
    st.builds(StructuredOutput, json_schema=st.just(json.dumps({"type": "object"}))),
    st.builds(StructuredOutput, json_object=st.just(True)),
    st.builds(StructuredOutput, regex=words),
    st.builds(StructuredOutput, grammar=words),
    st.builds(StructuredOutput, choice=st.builds(Choice, choices=lists(words, min_size=1))),
)
beams = st.builds(BeamSearch, width=st.integers(4, 16), length_penalty=floats(-2, 2), early_stopping=st.booleans())

COMMON_SAMPLING = {
    "temperature": floats(0, 100),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": floats(0, 1, exclude_min=True),
    "min_p": floats(0, 1),
    "seed": st.integers(0, 2**64 - 1),
}
SAMPLING = {
    **COMMON_SAMPLING,
    "presence_penalty": floats(-2, 2),
    "frequency_penalty": floats(-2, 2),
    "repetition_penalty": floats(0, 2, exclude_min=True),
    "logit_bias": lists(biases, unique_by=lambda entry: entry.token_id),
    "allowed_token_ids": st.lists(st.integers(200, 399), max_size=9, unique=True),
    "banned_token_ids": st.lists(st.integers(0, 199), max_size=9, unique=True),
    "bad_token_sequences": lists(sequences.filter(lambda s: len(s.token_ids) > 1), unique_by=str),
    "num_logprobs": st.integers(0, 64),
    "structured_output": constraints,
}
BEAM_SAMPLING = {**COMMON_SAMPLING, "beam_search": beams}
ONLY_GENERATE = {"num_prompt_logprobs": st.integers(0, 64)}

OUTPUT = {
    "text": st.booleans(),
    "token_ids": st.booleans(),
    "cumulative": st.booleans(),
    "final_only": st.booleans(),
    "heartbeat": st.just({"seconds": 3, "nanos": 5}),
    "prompt_token_ids": st.booleans(),
}
OPTIONS = {
    "max_tokens": st.integers(10, 2**32 - 1),
    "stop_token_ids": lists(token_ids),
    "stop_token_sequences": lists(sequences),
    "n": st.integers(1, 4),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "cache_salt": st.binary(max_size=8),
    "routing_key": st.text(st.characters(codec="utf-8"), max_size=8),
    "dp_rank": st.integers(0, 1),
    "skip_special_tokens": st.booleans(),
    "include_stop": st.booleans(),
    "output": st.builds(OutputOptions),
}
NOT_WITH_BEAMS = {"stop": lists(words), "bad_words": lists(words)}
NOT_WITH_GRAMMARS = {"min_tokens": st.integers(0, 10), "ignore_eos": st.booleans()}


@st.composite
def options(draw, *, for_chat=False):
    is_beam = draw(st.booleans())
    sampling = dict(BEAM_SAMPLING if is_beam else SAMPLING)
    if not for_chat and not is_beam:
        sampling |= ONLY_GENERATE
    values = draw(st.fixed_dictionaries({}, optional=sampling))
    if is_beam:
        values["beam_search"] = draw(beams)
    fields = dict(OPTIONS)
    if not is_beam:
        fields |= NOT_WITH_BEAMS
    if "structured_output" not in values:
        fields |= NOT_WITH_GRAMMARS
    rest = draw(st.fixed_dictionaries({}, optional=fields))
    rest["output"] = OutputOptions(**draw(st.fixed_dictionaries({}, optional=OUTPUT)))
    return GenerationOptions(sampling=SamplingParams(**values), **rest)
