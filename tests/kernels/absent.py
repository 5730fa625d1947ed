"""A GPU that is not there: Triton compiles for it, and nothing is launched."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class AbsentGpu:
    """What Triton asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compiled_sizes(artifact: str) -> Iterator[Counter[str]]:
    """Within, every launch compiles and runs nothing. Counts bytes of code by kernel; `artifact`: cubin or hsaco."""
    sizes: Counter[str] = Counter()
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        compiled = launch(self, *args, **(options | {"warmup": True}))
        sizes[self.fn.__name__] += len(compiled.asm[artifact])
        return compiled

    with patch.object(JITFunction, "run", compile_only):
        yield sizes
