"""A worker's refusal of a sequence, as an error in the words of the client's own request."""

import re

from fissile.errors import (
    FieldViolation,
    FissileError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from fissile.v1 import RequestOutput

RETRY_AFTER_SECONDS = 1.0

_CODES: dict[int, type[FissileError]] = {
    error.code.value[0]: error
    for error in (InvalidArgumentError, ResourceExhaustedError, UnavailableError, UnimplementedError)
}
_OF_OPTIONS = {
    "sampling", "stop_token_ids", "stop_token_sequences", "max_tokens", "min_tokens", "ignore_eos", "priority",
    "cache_salt",
}  # fmt: skip
"""Fields of Sequence that have the same name in GenerationOptions."""
_FIELD = re.compile(r"([a-z_]+)[a-z_\[\]0-9.]*(?=: )")


def error_of(output: RequestOutput, prompt_field: str) -> FissileError:
    """`prompt_field`: path of the field that the sequence's prompt came from."""
    kind = _CODES.get(output.error_code, InternalError)
    detail = output.detail or "the worker failed on this request"
    if kind in (ResourceExhaustedError, UnavailableError):
        return kind(detail, retry_after=RETRY_AFTER_SECONDS)
    found = _FIELD.match(detail)
    if found is None or kind is InternalError:
        return kind(detail)
    path = _client_path(found[0], found[1], prompt_field)
    description = detail[found.end() + 2 :]
    return kind(f"{path}: {description}", violations=[FieldViolation(path, description)])


def _client_path(path: str, field: str, prompt_field: str) -> str:
    if field in _OF_OPTIONS:
        return f"options.{path}"
    return prompt_field if field in ("token_ids", "num_prompt_tokens") else path
