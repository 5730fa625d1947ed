"""Requests with one thing in them, and what is found wrong with one."""

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from fissile.errors import InvalidArgumentError, UnimplementedError
from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    Choice,
    GenerateRequest,
    GenerationOptions,
    LogitBias,
    OutputOptions,
    SamplingParams,
    StructuredOutput,
    TokenSequence,
    Tool,
    ToolCall,
    ToolChoice,
)
from router.asking.checks import Limits
from router.asking.validation import validate

LIMITS = Limits(vocab_size=100, max_model_len=16, max_prompt_bytes=60, dp_size=2)
NAN, INF = float("nan"), float("inf")
MIB = 1024 * 1024
USER = 2


def faults(request):
    try:
        validate(request, LIMITS)
    except InvalidArgumentError as error:
        return {v.field: v.description for v in error.violations}
    except UnimplementedError:
        return {}
    return {}


def ask(text="hi", sampling=None, **options):
    return GenerateRequest(text=text, options=GenerationOptions(sampling=sampling, **options))


def sampled(**values):
    return ask(sampling=SamplingParams(**values))


def biased(*entries):
    return sampled(logit_bias=[LogitBias(token_id=i, bias=value) for i, value in entries])


def sequences(*token_ids):
    return [TokenSequence(token_ids=ids) for ids in token_ids]


def structured(**options):
    def build(**constraint):
        return ask(sampling=SamplingParams(structured_output=StructuredOutput(**constraint)), **options)

    return build


def choices(*texts):
    return structured()(choice=Choice(choices=texts))


def heartbeat(milliseconds):
    duration = Duration()
    duration.FromMilliseconds(milliseconds)
    return ask(output=OutputOptions(heartbeat=duration))


def chat(*messages, **fields):
    return ChatRequest(messages=messages or [ChatMessage(role=USER, content="a")], **fields)


HELD = "cannot go with a tool_choice that calls are held to"


def choosing(options=None, **choice):
    return chat(tools=[Tool(name="f")], options=options, tool_choice=ToolChoice(**choice))


def tools(*names):
    return chat(tools=[Tool(name=name) for name in names])


def called(arguments):
    return chat(ChatMessage(role=3, tool_calls=[ToolCall(name="f", arguments=arguments)]))


def variables(value):
    struct = Struct()
    struct.update({"a": {"b": [0, value]}})
    return chat(template_arguments=struct)


def between(low, high, *values, sign="≤"):
    """(value, words) of values outside of [low, high]."""
    return [(value, f"must be {low} {sign} value ≤ {high}, is {value:g}") for value in values]


SAMPLING = "options.sampling"
BEYOND = "must be below the vocabulary size 100, is 100"


def bad_fields(cases):
    """Each a request, the field that is at fault, and what is said of it."""
    ids = [f"{i}-{field}" for i, (_, field, _) in enumerate(cases)]
    return pytest.mark.parametrize(("request_", "field", "words"), cases, ids=ids)


def borders(requests):
    return pytest.mark.parametrize("request_", requests, ids=range(len(requests)))
