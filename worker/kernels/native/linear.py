"""Linear layers over weights packed for the library."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.linear import LinearSpec, TableKernel
from worker.kernels.native.library import Matrix, engine, obstacle, pointer
from worker.kernels.native.memory import arena
from worker.kernels.weights import Blocks, Dense, Grouped, Weight

ROW_BLOCK = 32
"""Inputs of a row that share a scale, where the weights are blocks."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    view: Matrix
    """What the library reads; it points into the tensors."""
    data: Tensor
    bias: Tensor | None


class NativeLinear(TableKernel):
    copies = True

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._engine = engine()

    def pack(self, weight: Weight) -> PackedMatrix:
        assert isinstance(weight, Dense | Blocks)
        matrix = matrix_of(weight, self._spec.in_features, self._spec.out_features)
        data = arena().take(self._engine.packed_bytes(matrix))
        pack_into(data, matrix, weight)
        return PackedMatrix(matrix, data, weight.bias)

    def __call__(self, x: Tensor, packed: PackedMatrix, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(x), self._spec.out_features)
        self._engine.product(packed.view, x.contiguous(), out)
        return out

    def rows(self, packed: PackedMatrix, ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), self._spec.in_features)
        self._engine.rows(packed.view, ids.contiguous(), out)
        return out


def matrix_of(weight: Weight, in_features: int, out_features: int) -> Matrix:
    """How a weight is read, once it is somewhere."""
    bits, block = 32, 0
    if isinstance(weight, Blocks):
        bits, block = weight.bits, min(weight.block, ROW_BLOCK)
    elif isinstance(weight, Grouped):
        bits, block = 4 if weight.form == "uint4" else 8, min(weight.group, ROW_BLOCK)
    return Matrix(None, pointer(weight.bias), in_features, out_features, bits, block)


def pack_into(data: Tensor, matrix: Matrix, weight: Weight) -> None:
    """`data`: uint8 [packed bytes], to which the matrix points from then on. Groups must have minima."""
    matrix.data = data.data_ptr()
    if isinstance(weight, Dense):
        engine().pack_floats(matrix, weight.weight.contiguous())
        return
    are_halves = False
    if isinstance(weight, Blocks):
        weight = weight.in_form(weight.bits, matrix.block)
    else:
        are_halves, weight = weight.form == "uint4", weight.in_groups(matrix.block)
    assert weight.minima is not None
    parts = (part.contiguous() for part in (weight.numbers, weight.scales, weight.minima))
    engine().pack_blocks(matrix, *parts, are_halves=are_halves)


def supports_linear(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype != torch.float32 or obstacle() is not None:
        return False
    return spec.kind is Dense or (spec.kind is Blocks and spec.in_features % ROW_BLOCK == 0)
