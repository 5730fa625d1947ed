"""What a test leaves open: files, sockets, processes, and whatever else Python warns of when it finds it as garbage."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leaving_nothing_open() -> Iterator[None]:
    """Around a test (`@leaving_nothing_open()`), so that what it made is garbage at the end: it fails of any warning.
    What others left before is not looked at."""
    with warnings.catch_warnings(action="ignore"):
        gc.collect()
    with warnings.catch_warnings(record=True, action="always") as warned:
        yield
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
