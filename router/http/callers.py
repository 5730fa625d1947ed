"""Who sent an HTTP request."""

from typing import cast

from starlette.requests import Request
from starlette.types import Scope

from router.callers.caller import Caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope.setdefault("state", {})["caller"] = caller


def caller_of(request: Request) -> Caller:
    """As the front found out before its endpoint ran."""
    return cast(Caller, request.state.caller)
