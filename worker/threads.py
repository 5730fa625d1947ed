"""What blocks, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but the process can end without waiting for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            set_outcome()

    def run() -> None:
        set_outcome: Callable[[], None]
        try:
            result = function()
        # Libraries in Rust panic with what is no Exception. Nobody may wait for ever because of that.
        except BaseException as error:
            set_outcome = partial(future.set_exception, error)
        else:
            set_outcome = partial(future.set_result, result)
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=run, name="start-stop", daemon=True).start()
    return await future
