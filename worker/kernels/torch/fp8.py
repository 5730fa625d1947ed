"""float8_e4m3 in a cache: numbers with a scale, read and written by way of bytes, as torch indexes these."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0
"""The largest number."""


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale, rounded. What is beyond the range becomes its end; what is not finite becomes NaN, or it would be
    hidden."""
    scaled = x.float() / scale
    return (scaled.clamp(-MOST, MOST) + scaled * 0).to(FP8)


def write_rows(cache: Tensor, rows: Tensor, values: Tensor) -> None:
    """Rows of the cache's first dimension; `values` are of its type."""
    if cache.dtype == FP8:
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    cache.index_copy_(0, rows, values)


def read_rows(cache: Tensor, rows: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows of the cache's first dimension, in `dtype` where they are float8."""
    if cache.dtype != FP8:
        return cache.index_select(0, rows)
    found = cache.view(torch.uint8).index_select(0, rows).view(FP8).to(dtype)
    return found if scale == 1 else found * scale
