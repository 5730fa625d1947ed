"""Weights of a linear layer as a checkpoint has them, by kind. A kernel packs them once into what it reads.

O output features, I input features, of this rank's shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["none", "stored", "int8", "int4"]
"""What becomes of a checkpoint's weights: numbers of the model's dtype; the blocks that it has, where it has some;
blocks of so many bits."""


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Tensor
    """float [O, I]"""
    bias: Tensor | None = None
    """float [O]"""

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """DeepSeek's form: float8_e4m3 in square blocks with a scale each."""

    weight: Tensor
    """float8_e4m3 [O, I]"""
    scales: Tensor
    """float32 [O / 128, I / 128], rounded up: what a block is multiplied by."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MxFp4:
    """OCP microscaling: blocks of 32 along I share a power of two."""

    weight: Tensor
    """uint8 [O, I / 2]: two float4_e2m1 a byte, the lower half first."""
    scales: Tensor
    """uint8 [O, I / 32]: exponents, biased by 127."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Whole numbers in blocks along I: weight = scale × number + minimum. What GGUF files store has this form."""

    numbers: Tensor
    """uint8 [O, I]"""
    scales: Tensor
    """float16 [O, I / block]"""
    minima: Tensor
    """float16 [O, I / block]"""
    bits: int
    """4 or 8: numbers are below 2 ** bits."""
    bias: Tensor | None = None
    is_exact: bool = False
    """`floats` are the checkpoint's, to the bit: no scale or minimum was rounded."""

    @property
    def block(self) -> int:
        """32, or 16 with 8 bits."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """As they are packed."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.numbers.numel() * self.bits // 8 + self.scales.nbytes + self.minima.nbytes + bias

    def select(self, rows: Tensor | slice) -> "Blocks":
        """Without the bias."""
        return Blocks(self.numbers[rows], self.scales[rows], self.minima[rows], self.bits, is_exact=self.is_exact)

    def floats(self) -> Tensor:
        """float32 [O, I]"""
        numbers = self.numbers.unflatten(1, (-1, self.block)).float()
        return numbers.mul_(self.scales.float()[..., None]).add_(self.minima.float()[..., None]).flatten(1)

    def with_bias(self, bias: Tensor | None) -> "Blocks":
        return replace(self, bias=bias)

    def in_form(self, bits: int, block: int) -> "Blocks":
        """The same weights with more bits or smaller blocks."""
        scales, minima = (x.repeat_interleave(self.block // block, 1) for x in (self.scales, self.minima))
        return Blocks(self.numbers, scales, minima, bits, self.bias)

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> "Blocks":
        """The nearest in blocks of 32 between each block's least and largest weight. float32 [O, I]."""
        parts = weight.unflatten(1, (-1, 32))
        minima = parts.amin(-1).half()
        scales = (parts.amax(-1) - minima.float()).div_((1 << bits) - 1).half()
        steps = scales.float()[..., None]
        numbers = torch.where(steps > 0, (parts - minima.float()[..., None]) / steps, 0)
        return cls(numbers.round_().clamp_(0, (1 << bits) - 1).to(torch.uint8).flatten(1), scales, minima, bits)

    @classmethod
    def joined(cls, parts: Sequence["Blocks"]) -> "Blocks":
        """Outputs side by side, in a form that all of them have."""
        if len(parts) == 1:
            return parts[0]
        bits, block = max(part.bits for part in parts), min(part.block for part in parts)
        if block < 32:
            bits = 8
        alike = [part.in_form(bits, block) for part in parts]
        return cls(
            torch.cat([part.numbers for part in alike]),
            torch.cat([part.scales for part in alike]),
            torch.cat([part.minima for part in alike]),
            bits,
        )


Weight = Dense | Fp8Block | MxFp4 | Blocks
