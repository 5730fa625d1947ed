"""Libraries for other instructions than this processor's best."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from worker.kernels.native import library
from worker.kernels.native.build import LEVELS, Level, this_cpu

LEVELS_OF_ATTENTION = [level for level in LEVELS if level.cpu_flags <= this_cpu() and level.name != "avx512"]
"""Those that this processor has; avx512 differs from avx512vnni in products of blocks alone."""


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


def multiplies_pairs() -> bool:
    """Whether attention over a cache of bfloat16 rounds queries and weights to that, too, at the level in use."""
    return library.best_level(this_cpu()).name == "avx512bf16"


def has_whole_scales(bits: int) -> bool:
    """Whether weights of so many bits have whole numbers for scales at the level in use."""
    return bits == 4 and library.best_level(this_cpu()).name in ("avx512vnni", "avx512bf16")
