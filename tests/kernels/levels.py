"""Libraries for other instructions than this processor's best."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from worker.kernels.native import library
from worker.kernels.native.build import Level


@contextmanager
def at_level(level: Level) -> Iterator[None]:
    """Kernels that are made meanwhile are of this level; who needs others makes them before or after."""
    with patch.object(library, "best_level", lambda _: level):
        forget_library()
        yield
    forget_library()


def forget_library() -> None:
    for cached in (library.obstacle, library._functions, library.engine):
        cached.cache_clear()
