"""fissile: an LLM inference engine split in two gRPC services, and the client to talk to it.

    from fissile import Client

    with Client("localhost:50051") as client:
        for delta in client.generate("The capital of France is", max_tokens=16):
            print(delta.text, end="", flush=True)

The names below load on first use, so that `import fissile.v1` (the stubs, which the services need too) costs nothing
else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fissile.async_client import AsyncClient, AsyncStream
    from fissile.client import Client, Stream
    from fissile.errors import (
        AlreadyExistsError,
        CancelledError,
        DeadlineExceededError,
        FieldViolation,
        FissileError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        PermissionDeniedError,
        QuotaExceededError,
        ResourceExhaustedError,
        UnauthenticatedError,
        UnavailableError,
        UnimplementedError,
        UnreachableError,
    )
    from fissile.requests import Message, Tool, ToolChoice
    from fissile.results import Completion, Delta, Generation, Model, ModelVersion, Stats, ToolCall
    from fissile.tls import ClientTls

_HOMES = {
    "AlreadyExistsError": "fissile.errors",
    "AsyncClient": "fissile.async_client",
    "AsyncStream": "fissile.async_client",
    "CancelledError": "fissile.errors",
    "Client": "fissile.client",
    "ClientTls": "fissile.tls",
    "Completion": "fissile.results",
    "DeadlineExceededError": "fissile.errors",
    "Delta": "fissile.results",
    "FieldViolation": "fissile.errors",
    "FissileError": "fissile.errors",
    "Generation": "fissile.results",
    "InternalError": "fissile.errors",
    "InvalidArgumentError": "fissile.errors",
    "Message": "fissile.requests",
    "Model": "fissile.results",
    "ModelVersion": "fissile.results",
    "NotFoundError": "fissile.errors",
    "PermissionDeniedError": "fissile.errors",
    "QuotaExceededError": "fissile.errors",
    "ResourceExhaustedError": "fissile.errors",
    "Stats": "fissile.results",
    "Stream": "fissile.client",
    "Tool": "fissile.requests",
    "ToolChoice": "fissile.requests",
    "ToolCall": "fissile.results",
    "UnauthenticatedError": "fissile.errors",
    "UnavailableError": "fissile.errors",
    "UnimplementedError": "fissile.errors",
    "UnreachableError": "fissile.errors",
}

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "CancelledError",
    "Client",
    "ClientTls",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "FieldViolation",
    "FissileError",
    "Generation",
    "InternalError",
    "InvalidArgumentError",
    "Message",
    "Model",
    "ModelVersion",
    "NotFoundError",
    "PermissionDeniedError",
    "QuotaExceededError",
    "ResourceExhaustedError",
    "Stats",
    "Stream",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnreachableError",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
