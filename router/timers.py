"""The deadline of open requests."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fissile.errors import DeadlineExceededError
from router.answering.request import OpenRequest


def deadline_timer(requests: Sequence[OpenRequest], seconds_left: float | None) -> AbstractContextManager[None]:
    """End the requests with DEADLINE_EXCEEDED when their time is up. The worker knows the deadline, too; if its own
    FINISH_REASON_DEADLINE comes first, that is a request's ordinary end."""
    return nullcontext() if seconds_left is None else _timer(requests, seconds_left)


@contextmanager
def _timer(requests: Sequence[OpenRequest], seconds_left: float) -> Iterator[None]:
    error = DeadlineExceededError("the deadline passed before the request was finished")
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(max(0.0, seconds_left), request.fail, error) for request in requests]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
