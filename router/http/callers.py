"""Who sent an HTTP request."""

from typing import cast

from starlette.requests import Request
from starlette.types import Scope

from common.hosts import name_of_host
from router.callers.caller import Caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope.setdefault("state", {})["caller"] = caller


def caller_of(request: Request) -> Caller:
    """As the front found out before its endpoint ran."""
    return cast(Caller, request.state.caller)


def client_of(scope: Scope) -> str:
    """Whom to count what a request takes against: its caller, or the host where nobody asks who calls."""
    caller: Caller | None = scope.get("state", {}).get("caller")
    return caller.name if caller else name_of_host(host_of(scope))


def host_of(scope: Scope) -> str:
    return scope["client"][0] if scope["client"] else "unknown"
