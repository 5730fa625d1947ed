"""From Python arguments to request messages. Shared by both clients; values are checked by the router, not here."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from fissile.v1 import generation_pb2, sampling_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    """One of ROLES."""
    content: str


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `chat`. What is not given comes from the model's defaults."""

    max_tokens: int
    min_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    logprobs: int
    """How many of the most likely tokens to report beside the chosen one."""
    prompt_logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_token_sequences: Sequence[Sequence[int]]
    include_stop: bool
    ignore_eos: bool
    bad_words: Sequence[str]
    skip_special_tokens: bool
    n: int
    priority: int
    cache_salt: bytes
    routing_key: str
    dp_rank: int
    return_token_ids: bool
    return_prompt_token_ids: bool


_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "allowed_token_ids": "allowed_token_ids",
    "banned_token_ids": "banned_token_ids",
    "logprobs": "num_logprobs",
    "prompt_logprobs": "num_prompt_logprobs",
}
_OUTPUT = {"return_token_ids": "token_ids", "return_prompt_token_ids": "prompt_token_ids"}


def generation_options(options: Options) -> generation_pb2.GenerationOptions:
    """Raises TypeError for an unknown name or a value of the wrong type."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    bias = values.pop("logit_bias", {})
    sequences = values.pop("stop_token_sequences", ())
    stop = values.pop("stop", ())
    return generation_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(
            **_take(values, _SAMPLING),
            logit_bias=[sampling_pb2.LogitBias(token_id=token_id, bias=value) for token_id, value in bias.items()],
        ),
        output=generation_pb2.OutputOptions(**_take(values, _OUTPUT)),
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_sequences=[sampling_pb2.TokenSequence(token_ids=sequence) for sequence in sequences],
        **values,
    )


def _take(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of `names` (option → field of the message), which leave `values`."""
    return {field: values.pop(name) for name, field in names.items() if name in values}


def generate_request(
    prompt: str | Sequence[int], model: str, request_id: str, add_special_tokens: bool, options: Options
) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        add_special_tokens=add_special_tokens,
        options=generation_options(options),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.CopyFrom(sampling_pb2.TokenSequence(token_ids=prompt))
    return request


def chat_request(
    messages: Sequence[Message], model: str, request_id: str, continue_final_message: bool, options: Options
) -> generation_pb2.ChatRequest:
    """Raises ValueError for a role that does not exist."""
    return generation_pb2.ChatRequest(
        model=model,
        request_id=request_id,
        messages=[_chat_message(message) for message in messages],
        continue_final_message=continue_final_message,
        options=generation_options(options),
    )


def _chat_message(message: Message) -> generation_pb2.ChatMessage:
    if message["role"] not in ROLES:
        raise ValueError(f"role {message['role']!r}: not one of {', '.join(ROLES)}")
    return generation_pb2.ChatMessage(role=f"CHAT_ROLE_{message['role'].upper()}", content=message["content"])
