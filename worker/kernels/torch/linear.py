"""Linear layers in torch: oneDNN with weights packed once, where a CPU has it; F.linear elsewhere.

On a CPU, `F.linear` in float32 goes to MKL, which repacks the weight at each call and is two to three times slower than
a packed oneDNN product at the few rows of a decode step. The packed operators are those that Inductor emits; they are
not a public interface of torch, hence the self-check.
"""

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.linear import LinearKernel, LinearSpec
from worker.kernels.weights import Dense, Weight

logger = logging.getLogger(__name__)

PACK_ROWS = 32
"""Rows that the packing is tuned for; it serves 1 to 2048 rows equally well."""


class PackedLinear(NamedTuple):
    weight: Any
    """Tensor [out, in], plain or in oneDNN's opaque layout."""
    bias: Tensor | None


class PlainLinear(LinearKernel):
    """`F.linear`, on every device."""

    def pack(self, weight: Weight) -> PackedLinear:
        assert isinstance(weight, Dense)
        return PackedLinear(weight.weight.contiguous(), weight.bias)

    def __call__(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        if out is None:
            return functional.linear(x, packed.weight, packed.bias)
        if packed.bias is None:
            return torch.mm(x, packed.weight.T, out=out)
        return torch.addmm(packed.bias, x, packed.weight.T, out=out)


class OneDnnLinear(LinearKernel):
    """Packed oneDNN product, on a CPU."""

    copies = True

    def __init__(self) -> None:
        self._reorder = torch.ops.mkldnn._reorder_linear_weight
        self._product = torch.ops.mkldnn._linear_pointwise

    def pack(self, weight: Weight) -> PackedLinear:
        assert isinstance(weight, Dense)
        return PackedLinear(self._reorder(weight.weight.contiguous(), PACK_ROWS), weight.bias)

    def __call__(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        product: Tensor = self._product(x, packed.weight, packed.bias, "none", [], "")
        return product if out is None else out.copy_(product)


def supports_dense(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return spec.kind is Dense


def supports_onednn(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return spec.kind is Dense and device.type == "cpu" and _onednn_works(dtype)


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Whether the packed product is there and computes the right numbers. Takes a few hundredths of a second."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(384, 768, generator=generator).to(dtype)
    x = torch.randn(40, 768, generator=generator).to(dtype)
    bias = weight[:, 0].contiguous()
    try:
        linear = OneDnnLinear()
        packed = linear.pack(Dense(weight, bias))
        results = [linear(x[:rows], packed) for rows in (1, 8, 40)]
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("no packed oneDNN linear here (%s); using F.linear", str(error).partition("\n")[0])
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    expected = x.double() @ weight.double().T + bias.double()
    errors = [(got.double() - expected[: len(got)]).abs().max() for got in results]
    if not max(errors) < tolerance * expected.abs().max():
        logger.warning("packed oneDNN linear computes wrong results on this CPU; using F.linear")
        return False
    return True
