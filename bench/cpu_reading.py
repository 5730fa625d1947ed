"""How fast a CPU's cores read memory, and how fast the native product of one row reads its weights. Part of
`make bench-cpu`."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.common import Figure
from worker.kernels.linear import LinearSpec
from worker.kernels.native.library import obstacle
from worker.kernels.native.linear import NativeLinear, PackedMatrix
from worker.kernels.native.memory import mapped
from worker.kernels.weights import Dense

READ_BYTES = 1 << 29
"""Larger than any cache, and about what the weights below take."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """(outputs, inputs) of a layer's products in their order; how many layers there are; the head."""

    layer: Sequence[tuple[int, int]]
    num_layers: int
    head: tuple[int, int]

    def of_a_step(self) -> list[tuple[int, int]]:
        return [*self.layer, *list(self.layer) * (self.num_layers - 1), self.head]


SMOLLM2 = Shapes([(960, 576), (576, 576), (3072, 576), (576, 1536)], 30, (49_152, 576))
"""135M: queries, keys and values; output; gates and ups; down."""


class Products:
    """All linear layers of a decode step of one row in float32, each with weights of its own, on as many threads as
    torch has when the process asks for native kernels first."""

    def __init__(self, shapes: Shapes) -> None:
        self._calls = [_call(*shape) for shape in shapes.of_a_step()]
        self.num_bytes = sum(packed.data.nbytes for _, packed, _, _ in self._calls)

    def __call__(self) -> None:
        for linear, packed, x, out in self._calls:
            linear(x, packed, out)


def _call(num_outputs: int, num_inputs: int) -> tuple[NativeLinear, PackedMatrix, Tensor, Tensor]:
    linear = NativeLinear(LinearSpec(num_inputs, num_outputs))
    packed = linear.pack(Dense(torch.ones(num_outputs, num_inputs)))
    return linear, packed, torch.ones(1, num_inputs), torch.empty(1, num_outputs)


def reading_figures(num_turns: int, shapes: Shapes = SMOLLM2, read_bytes: int = READ_BYTES) -> dict[str, Figure]:
    """Medians of turns, GB/s: torch's sum of floats on pages like those of weights, on all threads that torch has; then
    all products of a step. `vector_…` are left out where there are no native kernels."""
    numbers = mapped(read_bytes).view(torch.float32).fill_(1)
    why = obstacle()
    products = Products(shapes) if why is None else None
    if products is None:
        print(f"the product of one row is left out: {why}", flush=True)
    reads, vectors = [], []
    for _ in range(num_turns):
        reads.append(numbers.nbytes / _seconds(numbers.sum) / 1e9)
        if products is not None:
            products()  # torch's threads, which wait awake for some milliseconds, are asleep after it
            vectors.append(products.num_bytes / _seconds(products) / 1e9)
    figures: dict[str, Figure] = {"read_gb_s": round(statistics.median(reads), 1)}
    if products is not None:
        shares = [vector / read for vector, read in zip(vectors, reads, strict=True)]
        figures["vector_gb_s_float32"] = round(statistics.median(vectors), 1)
        figures["vector_read_share_float32"] = round(statistics.median(shares), 2)
    return figures


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
