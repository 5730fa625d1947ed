"""FissileError as OpenAI's error object, with the HTTP status its client turns into an exception."""

import math
from typing import Any

import grpc

from fissile.errors import MAX_MESSAGE_BYTES, FissileError, cut

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_STATUS: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, _INVALID),
    grpc.StatusCode.FAILED_PRECONDITION: (400, _INVALID),
    # Not 501: clients would try again.
    grpc.StatusCode.UNIMPLEMENTED: (400, _INVALID),
    grpc.StatusCode.UNAUTHENTICATED: (401, _INVALID),
    grpc.StatusCode.PERMISSION_DENIED: (403, _INVALID),
    grpc.StatusCode.NOT_FOUND: (404, _INVALID),
    grpc.StatusCode.ALREADY_EXISTS: (409, _INVALID),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, _SERVER),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, _SERVER),
}
_CODES = {grpc.StatusCode.NOT_FOUND: "model_not_found", grpc.StatusCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded"}


def status_of(error: FissileError) -> int:
    return _STATUS.get(error.code, (500, _SERVER))[0]


def headers_of(error: FissileError) -> dict[str, str]:
    """Retry-After, in whole seconds, where trying again helps."""
    return {} if error.retry_after is None else {"retry-after": str(math.ceil(error.retry_after))}


def error_object(error: FissileError) -> dict[str, Any]:
    """`param` is the first field at fault; the message names all of them."""
    param = error.violations[0].field if error.violations else None
    if error.code == grpc.StatusCode.NOT_FOUND:
        param = "model"
    code = _CODES.get(error.code, error.code.name.lower())
    return plain_error(error.message, _STATUS.get(error.code, (500, _SERVER))[1], param, code)


def plain_error(
    message: str, kind: str = _INVALID, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """As long as on gRPC, whatever a client's own words in it are."""
    return {"error": {"message": cut(message, MAX_MESSAGE_BYTES), "type": kind, "param": param, "code": code}}
