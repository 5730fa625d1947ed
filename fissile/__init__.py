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
    from common.channel import ClientTls
    from common.errors import FissileError
    from fissile.async_client import AsyncClient, AsyncStream
    from fissile.client import Client, Stream
    from fissile.requests import Message, Tool
    from fissile.results import Completion, Delta, Generation, Model, Stats, ToolCall

_HOMES = {
    "AsyncClient": "fissile.async_client",
    "AsyncStream": "fissile.async_client",
    "Client": "fissile.client",
    "ClientTls": "common.channel",
    "Completion": "fissile.results",
    "Delta": "fissile.results",
    "FissileError": "common.errors",
    "Generation": "fissile.results",
    "Message": "fissile.requests",
    "Model": "fissile.results",
    "Stats": "fissile.results",
    "Stream": "fissile.client",
    "Tool": "fissile.requests",
    "ToolCall": "fissile.results",
}

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClientTls",
    "Completion",
    "Delta",
    "FissileError",
    "Generation",
    "Message",
    "Model",
    "Stats",
    "Stream",
    "Tool",
    "ToolCall",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
