"""Errors of both services, and their one mapping to and from gRPC status (google.rpc.Status with details).

Raise these anywhere; the interceptor of `common.calls` turns them into a status. Any other exception is a fault of
ours: INTERNAL, logged with its traceback, without its text leaking to the client.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "fissile"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

# gRPC refuses a call whose headers exceed 8 KiB. The message is in them twice, once with every special byte as three.
MAX_MESSAGE_BYTES = 1024
MAX_VIOLATIONS = 8
MAX_FIELD_BYTES = 128


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """`field` is the path in the request, such as `options.sampling.top_p`."""

    field: str
    description: str


class FissileError(Exception):
    """A failure with a gRPC status. `reason` is a stable UPPER_SNAKE_CASE word for programs."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(
        self, message: str, *, violations: Sequence[FieldViolation] = (), retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after = retry_after
        """Seconds."""

    @classmethod
    def of(cls, field: str, description: str) -> Self:
        """Because of one field, whose name the message begins with."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])

    def to_status(self) -> status_pb2.Status:
        """Short enough for the headers that it travels in, whatever a client's own words in it are."""
        message = cut(self.message, MAX_MESSAGE_BYTES)
        return status_pb2.Status(code=self.code.value[0], message=message, details=self.details())

    def details(self) -> list[any_pb2.Any]:
        """For programs."""
        details: list[any_pb2.Any] = [_pack(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN))]
        if self.violations:
            violations = self.violations[:MAX_VIOLATIONS]
            fields = [
                error_details_pb2.BadRequest.FieldViolation(
                    field=cut(v.field, MAX_FIELD_BYTES),
                    description=cut(v.description, MAX_MESSAGE_BYTES // len(violations)),
                )
                for v in violations
            ]
            details.append(_pack(error_details_pb2.BadRequest(field_violations=fields)))
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after * 1e9))
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        return details


class InvalidArgumentError(FissileError):
    """A bad field of a request."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"


class FailedPreconditionError(FissileError):
    """A request that is sound, of a model that cannot do it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class NotFoundError(FissileError):
    """No such model or service, or not for this key."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class AlreadyExistsError(FissileError):
    """A request, or a sequence, with this id is open."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "ALREADY_EXISTS"


class ResourceExhaustedError(FissileError):
    """Too much at the moment; `retry_after` says when to try again, where that is known."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"


class UnavailableError(FissileError):
    """Nobody could do it at the moment: the server, or all workers behind it."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class UnauthenticatedError(FissileError):
    """The server wants an API key, and this was none or another one."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(FissileError):
    """The server knows who calls, and does not let them do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class QuotaExceededError(ResourceExhaustedError):
    """The caller has used up what it may have; others may be served meanwhile."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, subject: str, limit: str, retry_after: float | None) -> None:
        """`subject` is whose quota, such as `key:alice`; `limit` which part of it, with its value."""
        super().__init__(f"the quota of {subject} is used up: {limit}", retry_after=retry_after)
        self.subject = subject
        self.limit = limit

    def details(self) -> list[any_pb2.Any]:
        violation = error_details_pb2.QuotaFailure.Violation(subject=self.subject, description=self.limit)
        return [*super().details(), _pack(error_details_pb2.QuotaFailure(violations=[violation]))]


class UnreachableError(UnavailableError):
    """The server was not reached, so nothing was sent. `cause` says why in plain words; the message has gRPC's, too."""

    def __init__(self, cause: str, details: str) -> None:
        super().__init__(f"{cause} ({details})")
        self.cause = cause


class DeadlineExceededError(FissileError):
    """The client's own deadline has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class CancelledError(FissileError):
    """The client, or who was between, gave the request up."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class UnimplementedError(FissileError):
    """A field or call that the server, or its workers, do not offer."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"


class InternalError(FissileError):
    """Our fault."""


_BY_CODE: dict[grpc.StatusCode, type[FissileError]] = {
    cls.code: cls
    for cls in (
        InvalidArgumentError,
        FailedPreconditionError,
        NotFoundError,
        AlreadyExistsError,
        ResourceExhaustedError,
        UnauthenticatedError,
        PermissionDeniedError,
        UnavailableError,
        DeadlineExceededError,
        CancelledError,
        UnimplementedError,
        InternalError,
    )
}


def from_rpc_error(error: grpc.RpcError) -> FissileError:
    """The typed error behind a failed call. Works for `grpc` and `grpc.aio` errors; both have these methods."""
    code: grpc.StatusCode = error.code()
    message = _plain(code, error.details() or code.name.lower())
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith(_NOT_REACHED):
        return UnreachableError(cause_of(message), message)
    if code is grpc.StatusCode.UNIMPLEMENTED and message == _NO_METHOD:
        return UnimplementedError(
            "the server there has no such method: is it a router in place of a worker, or the reverse?"
        )
    violations: list[FieldViolation] = []
    retry_after: float | None = None
    quota: error_details_pb2.QuotaFailure.Violation | None = None
    for detail in _status_of(error).details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Is(error_details_pb2.QuotaFailure.DESCRIPTOR):
            failure = error_details_pb2.QuotaFailure()
            detail.Unpack(failure)
            quota = next(iter(failure.violations), None)
    if quota is not None:
        return QuotaExceededError(quota.subject, quota.description, retry_after)
    result = _BY_CODE.get(code, FissileError)(message, violations=violations, retry_after=retry_after)
    result.code = code
    return result


def _plain(code: grpc.StatusCode, message: str) -> str:
    """What gRPC says of an end of this side's own making, in plain words."""
    if code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return message
    return next((words for own, words in _ENDS.items() if own in message), message)


_ENDS = {
    "Deadline Exceeded": "the deadline passed before the request was finished",
    "Channel closed!": "the client was closed",
    "Locally cancelled": "the stream was closed",
}
_NO_METHOD = "Method not found!"
"""gRPC's own words."""
_NOT_REACHED = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_TLS_CAUSES = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not of the CA that is trusted here",
    # Either, by version of gRPC.
    "is not in peer certificate": "the server's certificate is of another name than it was called by",
    "Hostname Verification Check failed": "the server's certificate is of another name than it was called by",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "Socket closed": "does the server want TLS, or a certificate of its clients?",
}
NOTHING_LISTENS = "nothing listens there"
NOT_REACHABLE = "it cannot be reached"
"""Where we know no better than gRPC."""
_CAUSES = _TLS_CAUSES | {
    "Connection refused": NOTHING_LISTENS,
    "http1.x server": "that is an HTTP port, and gRPC has one of its own",
    "errors resolving": "there is no such host",
    "DNS resolution failed": "there is no such host",
}


def cause_of(details: str) -> str:
    """Why a server was not reached, from gRPC's own words."""
    return next((cause for word, cause in _CAUSES.items() if word in details), NOT_REACHABLE)


def is_of_tls(details: str) -> bool:
    """Whether a connection failed because of TLS: waiting will not help."""
    return any(word in details for word in _TLS_CAUSES)


def _status_of(error: grpc.RpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return status_pb2.Status(code=code_pb2.UNKNOWN)


def cut(text: str, num_bytes: int) -> str:
    """`text` in UTF-8 of at most so many bytes; what is left out is an ellipsis."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= num_bytes else raw[:num_bytes].decode(errors="ignore") + "…"


def _pack(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo
    | error_details_pb2.QuotaFailure,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
