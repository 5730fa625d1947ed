"""Linear layers over weights packed for the library."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.interface import LinearSpec
from worker.kernels.native.library import Matrix, engine, obstacle, pointer
from worker.kernels.native.memory import arena
from worker.kernels.torch.linear import UnfusedLinear
from worker.kernels.weights import Dense, Weight


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    view: Matrix
    """What the library reads; it points into the tensors."""
    data: Tensor
    bias: Tensor | None


class NativeLinear(UnfusedLinear):
    """See `LinearKernel` and `TableKernel`."""

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._engine = engine()

    def pack(self, weight: Weight) -> PackedMatrix:
        assert isinstance(weight, Dense)
        matrix = Matrix(None, pointer(weight.bias), self._spec.in_features, self._spec.out_features, 32, 0)
        data = arena().take(self._engine.packed_bytes(matrix))
        matrix.data = data.data_ptr()
        self._engine.functions.fissile_pack_floats(matrix, pointer(weight.weight.contiguous()), matrix.data)
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


def supports_linear(spec: LinearSpec, device: torch.device, dtype: torch.dtype) -> bool:
    return spec.kind is Dense and device.type == "cpu" and dtype == torch.float32 and obstacle() is None
