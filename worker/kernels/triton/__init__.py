"""Operations for NVIDIA GPUs in Triton. On a CPU they run through Triton's interpreter, for tests."""

from typing import Any

from worker.kernels.select import Implementation

IMPLEMENTATIONS: list[Implementation[Any, Any]] = []
