"""A worker's refusal of a sequence, as an error in the words of the client's own request."""

import re

from fissile.errors import (
    MAX_MESSAGE_BYTES,
    FieldViolation,
    FissileError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
    cut,
)
from fissile.v1 import RequestOutput
from router.asking.answer_grammar import AnswerGrammar
from router.asking.spec import Prompt

RETRY_AFTER_SECONDS = 1.0

_CODES: dict[int, type[FissileError]] = {
    error.code.value[0]: error
    for error in (InvalidArgumentError, ResourceExhaustedError, UnavailableError, UnimplementedError)
}
_OF_OPTIONS = {
    "sampling", "stop_token_ids", "stop_token_sequences", "max_tokens", "min_tokens", "ignore_eos", "priority",
    "cache_salt",
}  # fmt: skip
"""Fields of SequenceGroup that have the same name in GenerationOptions."""
_COMPOSITE = "options.sampling.structured_output.composite"
_PART = re.compile(r"(part_\d+): ")


def error_of(output: RequestOutput, prompt: Prompt) -> FissileError:
    """`prompt`: the sequence's."""
    kind = _CODES.get(output.error_code, InternalError)
    detail = cut(output.detail, MAX_MESSAGE_BYTES) or "the worker failed on this request"
    if kind in (ResourceExhaustedError, UnavailableError):
        return kind(detail, retry_after=RETRY_AFTER_SECONDS)
    if not output.field or kind is InternalError:
        return kind(detail)
    path = _client_path(output.field, prompt.field)
    if prompt.grammar and path.startswith(_COMPOSITE):
        path, detail = _of_part(prompt.grammar, detail)
    return kind(f"{path}: {detail}", violations=[FieldViolation(path, detail)])


def _client_path(path: str, prompt_field: str) -> str:
    """The field of the client's request that became the field at `path` of the SequenceGroup."""
    field = path.partition(".")[0].partition("[")[0]
    if field in _OF_OPTIONS:
        return f"options.{path}"
    if field == "sequences":
        return "options.n"
    return prompt_field if field == "prompt_token_ids" else path


def _of_part(grammar: AnswerGrammar, description: str) -> tuple[str, str]:
    """Of a grammar that the router wrote: the client's field behind the part, or tools that are too much together."""
    part = _PART.match(description)
    if part is None:
        return "tools" if len(grammar.fields) > 1 else next(iter(grammar.fields.values()), _COMPOSITE), description
    return grammar.fields[part[1]], description[part.end() :]
