"""Experts of GPT-OSS: OCP microscaling, blocks of 32 float4_e2m1 that share a power of two.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

import torch
from torch import Tensor

from worker.kernels.weights import Grouped
from worker.loader.quantized.parts import Parts

BLOCKS, SCALES = "blocks", "scales"
BLOCK = 32


class MxFp4Tensor:
    """Implements `LazyTensor`: float32 [experts, inputs, outputs], as the checkpoint has them where they are not
    quantised. Stored are bytes of two weights, the lower half first, [experts, outputs, blocks, 16], and exponents,
    [experts, outputs, blocks]."""

    def __init__(self, parts: Parts) -> None:
        """Raises ValueError."""
        self._blocks, self._scales = parts.tensor(BLOCKS), parts.tensor(SCALES)
        stored = tuple(self._blocks.shape)
        if len(stored) != 4 or stored[-1] * 2 != BLOCK:
            raise ValueError(f"the shape of its blocks is {stored}; the last of four sizes must be {BLOCK // 2}")
        if tuple(self._scales.shape) != stored[:3]:
            raise ValueError(f"the shape of its scales is {tuple(self._scales.shape)}; {stored[:3]} is needed")
        experts, outputs, num_blocks, _ = stored
        self.shape: tuple[int, ...] = (experts, num_blocks * BLOCK, outputs)

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        length = self.shape[dim] - start if length is None else length
        if dim != 1:
            return self._numbers({0: 0, 2: 1}[dim], start, length).floats().transpose(1, 2)
        first = start // BLOCK
        numbers = self._numbers(2, first, -(-(start + length) // BLOCK) - first)
        return numbers.floats().transpose(1, 2).narrow(1, start - first * BLOCK, length)

    def stored(self, dim: int, start: int, length: int) -> Grouped | None:
        """[experts, outputs, inputs]: `Grouped` has inputs last."""
        if dim != 1:
            return self._numbers({0: 0, 2: 1}[dim], start, length)
        return None if start % BLOCK or length % BLOCK else self._numbers(2, start // BLOCK, length // BLOCK)

    def _numbers(self, dim: int, start: int, length: int) -> Grouped:
        """A slice of the stored dimension."""
        packed, exponents = self._blocks.read(dim, start, length), self._scales.read(dim, start, length)
        if packed.dtype != torch.uint8 or exponents.dtype != torch.uint8:
            raise ValueError(f"it is stored as {packed.dtype} and {exponents.dtype}; torch.uint8 is needed")
        return Grouped("e2m1", packed.flatten(-2), exponents)
