"""Linear layers over weights packed for the library."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.linear import Finder, LinearSpec, TableKernel
from worker.kernels.native.library import Matrix, Stored, engine, obstacle, pointer
from worker.kernels.native.memory import arena
from worker.kernels.weights import UNIT, Blocks, Dense, Grouped, Weight

ROW_BLOCK = 32
"""Inputs of a row that share a scale, where the weights are blocks."""
IN_BYTES, IN_HALVES, IN_PAIRS = range(3)
"""See pack.h."""


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
            out = torch.empty(x.shape[0], self._spec.out_features)
        self._engine.product(packed.view, x.contiguous(), out)
        return out

    def finder(self, packed: PackedMatrix) -> Finder:
        def find(x: Tensor) -> Tensor:
            ids = torch.empty(x.shape[0], dtype=torch.int64)
            self._engine.best(packed.view, x.contiguous(), ids)
            return ids

        return find

    def rows(self, packed: PackedMatrix, ids: Tensor) -> Tensor:
        out = torch.empty(ids.shape[0], self._spec.in_features)
        self._engine.rows(packed.view, ids.contiguous(), out)
        return out


def matrix_of(weight: Weight, in_features: int, out_features: int) -> Matrix:
    """How a weight is read, once it is somewhere."""
    bits, block, middle = 32, 0, 0
    if isinstance(weight, Blocks):
        bits, block = weight.bits, min(weight.block, ROW_BLOCK)
        middle = _middle_of(weight) if bits == 8 else 0
    elif isinstance(weight, Grouped):
        bits, block = 4 if weight.form == "uint4" else 8, min(weight.group, ROW_BLOCK)
    return Matrix(None, pointer(weight.bias), in_features, out_features, bits, block, middle)


def _middle_of(weight: Blocks) -> int:
    """How many scales all minima are below zero; 0: not all of them as many."""
    scales, minima = weight.scales.float(), weight.minima.float()
    middle = float((-minima / scales).nan_to_num(0).amax().round())
    return int(middle) if 0 < middle < 1 << weight.bits and torch.equal(scales * -middle, minima) else 0


def pack_into(data: Tensor, matrix: Matrix, weight: Weight) -> None:
    """`data`: uint8 [packed bytes], to which the matrix points from then on. Groups must have minima."""
    matrix.data = data.data_ptr()
    stored = weight.values if isinstance(weight, Dense) else weight
    if isinstance(stored, Tensor):
        engine().pack_floats(matrix, stored.contiguous())
    elif isinstance(stored, Blocks):
        form = IN_BYTES if stored.bits == 8 else IN_HALVES
        _pack_stored(matrix, stored.numbers, stored.scales, stored.minima, stored.block, form)
    else:
        assert stored.minima is not None
        form, unit_bytes = (IN_PAIRS, UNIT // 2) if stored.form == "uint4" else (IN_BYTES, UNIT)
        units = stored.numbers.unflatten(1, (-1, unit_bytes))
        _pack_stored(matrix, units, stored.scales, stored.minima, stored.group, form)


def _pack_stored(matrix: Matrix, units: Tensor, scales: Tensor, minima: Tensor, block: int, form: int) -> None:
    """Tensors of three dimensions, and two; they may be views."""
    units = units if units.stride(2) == 1 else units.contiguous()
    strides = (stride for part in (units, scales, minima) for stride in part.stride()[:2])
    pointers = (part.data_ptr() for part in (units, scales, minima))
    engine().pack_blocks(matrix, Stored(*pointers, *strides, block, form))


def supports_linear(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype != torch.float32 or obstacle() is not None:
        return False
    return spec.kind is Dense or (spec.kind is Blocks and spec.in_features % ROW_BLOCK == 0)
