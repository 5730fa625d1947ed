"""Options of a request, from Python values to the message. Shared by both clients; the router checks the values."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf import duration_pb2

from fissile.arguments import entries, fill, json_text, mapping, seconds
from fissile.v1 import generation_pb2, sampling_pb2


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
    """By token id."""
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_token_sequences: Sequence[Sequence[int]]
    logprobs: int
    """How many of the most likely tokens to report beside the chosen one."""
    prompt_logprobs: int
    """The same for the prompt; only `generate`."""

    json_schema: str | Mapping[str, Any] | bool
    """The answer is JSON that this schema allows. One of this and the next four can be given."""
    json_object: bool
    regex: str
    grammar: str
    """EBNF, in Lark syntax."""
    choice: Sequence[str]
    """The answer is one of these."""

    beam_width: int
    """Beam search in place of sampling."""
    length_penalty: float
    early_stopping: bool

    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_token_sequences: Sequence[Sequence[int]]
    include_stop: bool
    ignore_eos: bool
    n: int

    return_text: bool
    """Default True."""
    return_token_ids: bool
    return_prompt_token_ids: bool
    skip_special_tokens: bool
    """Default True."""
    cumulative: bool
    """Each delta carries everything so far in place of what is new."""
    final_only: bool
    """One delta for each completion, at the end."""
    heartbeat: float
    """Seconds of silence after which the router sends an empty message, so that a proxy keeps the connection."""

    priority: int
    """Lower runs first."""
    cache_salt: bytes
    routing_key: str
    dp_rank: int


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
_BEAM_SEARCH = {"beam_width": "width", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
_OUTPUT = {
    "return_text": "text",
    "return_token_ids": "token_ids",
    "return_prompt_token_ids": "prompt_token_ids",
    "cumulative": "cumulative",
    "final_only": "final_only",
}
_CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")


def generation_options(options: Options) -> generation_pb2.GenerationOptions:
    """None counts as not given. Raises InvalidArgumentError for a value that its field cannot hold, by the option's
    name, TypeError for an unknown name or options that exclude each other."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    stop = values.pop("stop", ())
    if "bad_words" in values:
        values["bad_words"] = entries("bad_words", values["bad_words"])
    return fill(
        generation_pb2.GenerationOptions,
        sampling=_sampling(values),
        output=_output(values),
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_sequences=_sequences("stop_token_sequences", values),
        **values,
    )


def _sampling(values: dict[str, Any]) -> sampling_pb2.SamplingParams:
    names = {field: option for option, field in _SAMPLING.items()}
    bias = mapping("logit_bias", values.pop("logit_bias", {}))
    return fill(
        sampling_pb2.SamplingParams,
        names,
        **_take(values, _SAMPLING),
        logit_bias=[_bias(f"logit_bias[{token_id!r}]", token_id, value) for token_id, value in bias.items()],
        bad_token_sequences=_sequences("bad_token_sequences", values),
        beam_search=_beam_search(_take(values, _BEAM_SEARCH)),
        structured_output=_structured_output(_take(values, {name: name for name in _CONSTRAINTS})),
    )


def _bias(name: str, token_id: Any, value: Any) -> sampling_pb2.LogitBias:
    return fill(sampling_pb2.LogitBias, {"token_id": name, "bias": name}, token_id=token_id, bias=value)


def _beam_search(values: dict[str, Any]) -> sampling_pb2.BeamSearch | None:
    if not values:
        return None
    if "width" not in values:
        raise TypeError("length_penalty and early_stopping need beam_width")
    return fill(sampling_pb2.BeamSearch, {"width": "beam_width"}, **values)


def _structured_output(values: dict[str, Any]) -> sampling_pb2.StructuredOutput | None:
    if not values:
        return None
    if len(values) > 1:
        raise TypeError(f"only one of {', '.join(_CONSTRAINTS)} can be given")
    ((kind, value),) = values.items()
    if kind == "choice":
        choices = fill(sampling_pb2.Choice, {"choices": kind}, choices=entries(kind, value))
        return sampling_pb2.StructuredOutput(choice=choices)
    if kind == "json_schema":
        value = json_text(kind, value)
    return fill(sampling_pb2.StructuredOutput, **{kind: value})


def _output(values: dict[str, Any]) -> generation_pb2.OutputOptions:
    names = {field: option for option, field in _OUTPUT.items()}
    heartbeat = None
    if "heartbeat" in values:
        heartbeat = duration_pb2.Duration()
        heartbeat.FromNanoseconds(round(seconds("heartbeat", values.pop("heartbeat")) * 1e9))
    return fill(generation_pb2.OutputOptions, names, **_take(values, _OUTPUT), heartbeat=heartbeat)


def _sequences(name: str, values: dict[str, Any]) -> list[sampling_pb2.TokenSequence]:
    """Of the option `name`, which leaves `values`."""
    return [
        fill(sampling_pb2.TokenSequence, {"token_ids": f"{name}[{index}]"}, token_ids=token_ids)
        for index, token_ids in enumerate(entries(name, values.pop(name, ())))
    ]


def _take(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of `names` (option → field of the message), which leave `values`."""
    return {field: values.pop(name) for name, field in names.items() if name in values}
