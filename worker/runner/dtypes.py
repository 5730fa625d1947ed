"""What a model computes in, and whether the processor can."""

from collections.abc import Set

import torch

from worker.loader.errors import ModelConfigError
from worker.runner.config import DTYPES

_INSTRUCTIONS: dict[torch.dtype, frozenset[str]] = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16"}),
}
"""Flags of processors, as Linux names them, any of which makes products in that dtype fast."""


def resolve_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """Raises ModelConfigError for a dtype that is not known."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    if name not in DTYPES:
        raise ModelConfigError(f"dtype {name!r} is not supported ({', '.join(DTYPES)})")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def is_emulated(dtype: torch.dtype, cpu_flags: Set[str]) -> bool:
    """Whether a CPU computes in `dtype` by way of float32. False where it does not say what it has."""
    return bool(cpu_flags) and dtype in _INSTRUCTIONS and not cpu_flags & _INSTRUCTIONS[dtype]
