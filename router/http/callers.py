"""Who sent an HTTP request."""

from starlette.requests import Request

from router.callers.caller import Caller


def caller_of(request: Request) -> Caller:
    return Caller(request.client.host if request.client else "unknown")
