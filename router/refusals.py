"""A worker's refusal of a sequence, as an error in the words of the client's own request."""

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
"""Fields of SequenceGroup that have the same name in GenerationOptions."""


def error_of(output: RequestOutput, prompt_field: str) -> FissileError:
    """`prompt_field`: path of the field that the sequence's prompt came from."""
    kind = _CODES.get(output.error_code, InternalError)
    detail = output.detail or "the worker failed on this request"
    if kind in (ResourceExhaustedError, UnavailableError):
        return kind(detail, retry_after=RETRY_AFTER_SECONDS)
    if not output.field or kind is InternalError:
        return kind(detail)
    path = _client_path(output.field, prompt_field)
    return kind(f"{path}: {detail}", violations=[FieldViolation(path, detail)])


def _client_path(path: str, prompt_field: str) -> str:
    """The field of the client's request that became the field at `path` of the SequenceGroup."""
    field = path.partition(".")[0].partition("[")[0]
    if field in _OF_OPTIONS:
        return f"options.{path}"
    if field == "sequences":
        return "options.n"
    return prompt_field if field == "prompt_token_ids" else path
