"""How a connection to a worker ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from fissile.errors import STATUS_DETAILS_KEY


async def until_first_ends(*loops: Coroutine[Any, Any, None]) -> None:
    """Run all; when one ends (they end by raising), cancel the others and raise what it raised."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_alive_after(error: grpc.aio.AioRpcError) -> bool:
    """The worker itself ended the call, as it does when it drains; or a message was too large for gRPC."""
    keys = {key for key, _ in error.trailing_metadata() or ()}
    return STATUS_DETAILS_KEY in keys or error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
