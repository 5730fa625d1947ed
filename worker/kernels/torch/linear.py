"""Linear layers of the torch backend: oneDNN with weights packed once, where that works and pays.

On a CPU, `F.linear` in float32 goes to MKL, which repacks the weight at each call and is two to three times slower than
a packed oneDNN product at the few rows of a decode step. The packed operators are those that Inductor emits; they are
not a public interface of torch, hence the self-check.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

PACK_ROWS = 32
"""Rows that the packing is tuned for; it serves 1 to 2048 rows equally well."""


class PackedLinear(NamedTuple):
    weight: Any
    """Tensor [out, in], plain or in oneDNN's opaque layout."""
    bias: Tensor | None


class PlainLinear:
    """`F.linear`, on every device."""

    name = "F.linear"

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(weight.contiguous(), bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return functional.linear(x, packed.weight, packed.bias)


class OneDnnLinear:
    """Packed oneDNN product, on a CPU."""

    name = "packed oneDNN"

    def __init__(self) -> None:
        self._reorder = torch.ops.mkldnn._reorder_linear_weight
        self._product = torch.ops.mkldnn._linear_pointwise

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(self._reorder(weight.contiguous(), PACK_ROWS), bias)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._product(x, packed.weight, packed.bias, "none", [], "")


LinearMethod = PlainLinear | OneDnnLinear


def choose_linear(device: torch.device, dtype: torch.dtype) -> LinearMethod:
    """The faster method of those that compute the right numbers here. Takes a few hundredths of a second."""
    plain = PlainLinear()
    if device.type != "cpu":
        return plain
    try:
        packed = OneDnnLinear()
        weight, x = _probe(dtype)
        if not _agree(packed, weight, x):
            logger.warning("packed oneDNN linear computes wrong results on this CPU; using F.linear")
            return plain
        plain_seconds, packed_seconds = (_seconds(method, weight, x[:8]) for method in (plain, packed))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("no packed oneDNN linear here (%s); using F.linear", str(error).partition("\n")[0])
        return plain
    chosen: LinearMethod = packed if packed_seconds < plain_seconds else plain
    logger.info(
        "linear layers in %s: %s (8 rows of 768 x 3072: F.linear %.2f ms, packed oneDNN %.2f ms)",
        str(dtype).removeprefix("torch."), chosen.name, plain_seconds * 1e3, packed_seconds * 1e3,
    )  # fmt: skip
    return chosen


def _probe(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3072, 768, generator=generator).to(dtype)
    return weight, torch.randn(40, 768, generator=generator).to(dtype)


def _agree(method: LinearMethod, weight: Tensor, x: Tensor) -> bool:
    bias = weight[:, 0].contiguous()
    packed = method.pack(weight, bias)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    for rows in (1, 8, 40):
        expected = x[:rows].double() @ weight.double().T + bias.double()
        error = (method.apply(x[:rows], packed).double() - expected).abs().max() / expected.abs().max()
        if not error < tolerance:
            return False
    return True


def _seconds(method: LinearMethod, weight: Tensor, x: Tensor) -> float:
    """Best of several calls: a stolen time slice must not decide."""
    packed = method.pack(weight, None)
    run: Callable[[], Tensor] = lambda: method.apply(x, packed)  # noqa: E731
    run()
    best = float("inf")
    for _ in range(9):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
