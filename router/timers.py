"""The deadline of an open request."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import DeadlineExceededError
from router.request import OpenRequest


@contextmanager
def deadline_timer(request: OpenRequest, seconds_left: float | None) -> Iterator[None]:
    """End the request with DEADLINE_EXCEEDED when its time is up. The worker knows the deadline, too; if its own
    FINISH_REASON_DEADLINE comes first, that is the request's ordinary end."""
    if seconds_left is None:
        yield
        return
    error = DeadlineExceededError("the deadline passed before the request was finished")
    timer = asyncio.get_running_loop().call_later(max(0.0, seconds_left), request.fail, error)
    try:
        yield
    finally:
        timer.cancel()
