"""Experts over weights packed for the library, each read once for all tokens that chose it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.experts import ExpertsKernel, ExpertsSpec, ExpertWeights
from worker.kernels.native.library import Experts, Matrix, engine, obstacle, pointer
from worker.kernels.native.linear import ROW_BLOCK, matrix_of, pack_into
from worker.kernels.native.memory import arena
from worker.kernels.weights import Dense, Grouped, Weight

PANELS = 32
"""As the decoder's: a gate and its up lie in panels of the same number."""
SILU, GELU, CLAMPED = range(3)
"""As outputs.h has them."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    view: Experts
    """What the library reads; it points into the tensors."""
    tensors: list[Tensor | None]


class NativeExperts(ExpertsKernel):
    def __init__(self, spec: ExpertsSpec) -> None:
        self._spec = spec
        self._engine = engine()

    def pack(self, weights: ExpertWeights) -> PackedExperts:
        spec, tensors = self._spec, list[Tensor | None]()
        gate_up = self._pack(weights.gate_up, spec.hidden_size, 2 * spec.intermediate_size, tensors)
        down = self._pack(weights.down, spec.intermediate_size, spec.hidden_size, tensors)
        curve = GELU if spec.activation == "gelu_tanh" else SILU
        alpha = limit = 0.0
        if spec.clamped is not None:
            curve, alpha, limit = CLAMPED, spec.clamped.alpha, spec.clamped.limit
        view = Experts(gate_up, down, spec.num_experts, spec.first_expert, spec.top_k, curve, alpha, limit)
        return PackedExperts(view, tensors)

    def _pack(self, weight: Weight, inputs: int, outputs: int, tensors: list[Tensor | None]) -> Matrix:
        """All experts' side by side; the matrix is the first one's."""
        assert isinstance(weight, Dense | Grouped)
        bias = None if weight.bias is None else weight.bias.contiguous()
        data, matrix = torch.empty(0), Matrix()
        for expert, each in enumerate(_apart(weight)):
            matrix = matrix_of(each, inputs, outputs)
            size = self._engine.packed_bytes(matrix)
            if expert == 0:
                data = arena().take(self._spec.num_experts * size)
            pack_into(data[expert * size : (expert + 1) * size], matrix, each)
        matrix.data, matrix.bias = data.data_ptr(), pointer(bias)
        tensors += (data, bias)
        return matrix

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, packed: PackedExperts, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        self._engine.experts(packed.view, x.contiguous(), weights.contiguous(), ids.long().contiguous(), out)
        return out


def supports_experts(spec: ExpertsSpec, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype != torch.float32 or spec.intermediate_size % PANELS or obstacle() is not None:
        return False
    return spec.kind is Dense or (spec.kind is Grouped and spec.hidden_size % ROW_BLOCK == 0)


def _apart(weight: Dense | Grouped) -> Iterator[Dense | Grouped]:
    """Each expert's, without its bias."""
    if isinstance(weight, Dense):
        yield from map(Dense, weight.weight)
    else:
        yield from (weight[expert] for expert in range(len(weight.numbers)))
