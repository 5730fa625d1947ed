"""Weights of a linear layer as a checkpoint has them, by kind. A kernel packs them once into what it reads.

O output features, I input features, of this rank's shard.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["none", "stored", "int8", "int4"]
"""What becomes of a checkpoint's weights: numbers of the model's dtype; the blocks that it has, where it has some;
blocks of so many bits."""


def power_of_two_in(*sizes: int) -> int:
    """The largest that divides all of them."""
    common = math.gcd(*sizes)
    return common & -common


@dataclass(frozen=True, slots=True)
class Dense:
    values: "Tensor | Blocks"
    """float [O, I]; or blocks that are these floats exactly, until a kernel packs them"""
    bias: Tensor | None = None
    """float [O]"""

    @property
    def weight(self) -> Tensor:
        """float [O, I]"""
        return self.values.floats() if isinstance(self.values, Blocks) else self.values

    @property
    def num_bytes(self) -> int:
        """Of the floats."""
        values, bias = self.values, 0 if self.bias is None else self.bias.nbytes
        return bias + (4 * math.prod(values.shape) if isinstance(values, Blocks) else values.nbytes)


UNIT = 32
"""Inputs whose numbers lie together in `Blocks`."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Whole numbers in blocks along I: weight = scale × number + minimum. What GGUF files store has this form, so the
    tensors may be views of such a file's rows."""

    numbers: Tensor
    """uint8 [O, I / 32, 32]; of 4 bits [O, I / 32, 16]: number i of 32 below number i + 16"""
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
        """A power of two: 32 or more, or 16 with 8 bits."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)"""
        return len(self.numbers), self.numbers.shape[1] * UNIT

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.numbers.nbytes + self.scales.nbytes + self.minima.nbytes + bias

    def select(self, rows: Tensor | slice) -> "Blocks":
        """Without the bias."""
        return Blocks(self.numbers[rows], self.scales[rows], self.minima[rows], self.bits, is_exact=self.is_exact)

    def through(self, move: Callable[[Tensor], Tensor]) -> "Blocks":
        """With each part, contiguous, as `move` gives it back."""
        numbers, scales, minima = (move(part.contiguous()) for part in (self.numbers, self.scales, self.minima))
        return replace(self, numbers=numbers, scales=scales, minima=minima)

    def columns(self, start: int, length: int) -> "Blocks | None":
        """Without the bias; None where they are no whole blocks and units."""
        block, end = self.block, start + length
        if start % block or length % block or start % UNIT or length % UNIT:
            return None
        numbers = self.numbers[:, start // UNIT : end // UNIT]
        scales, minima = (x[:, start // block : end // block] for x in (self.scales, self.minima))
        return Blocks(numbers, scales, minima, self.bits, is_exact=self.is_exact)

    def in_bytes(self) -> Tensor:
        """The numbers, uint8 [O, I / 32, 32]."""
        return self.numbers if self.bits == 8 else torch.cat((self.numbers & 15, self.numbers >> 4), -1)

    def floats(self) -> Tensor:
        """float32 [O, I]"""
        numbers = self.in_bytes().flatten(1).unflatten(1, (-1, self.block)).float()
        return numbers.mul_(self.scales.float()[..., None]).add_(self.minima.float()[..., None]).flatten(1)

    def with_bias(self, bias: Tensor | None) -> "Blocks":
        return replace(self, bias=bias)

    def in_form(self, bits: int, block: int) -> "Blocks":
        """The same weights with more bits or smaller blocks."""
        if (bits, block) == (self.bits, self.block):
            return self
        scales, minima = (x.repeat_interleave(self.block // block, 1) for x in (self.scales, self.minima))
        return Blocks(self.numbers if bits == self.bits else self.in_bytes(), scales, minima, bits, self.bias)

    @classmethod
    def of_numbers(cls, numbers: Tensor, scales: Tensor, minima: Tensor, bits: int) -> "Blocks":
        """`numbers`: uint8 [O, I]."""
        units = numbers.unflatten(1, (-1, UNIT))
        return cls(units if bits == 8 else in_halves(units), scales, minima, bits)

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> "Blocks":
        """The nearest in blocks of 32 between each block's least and largest weight. float32 [O, I]."""
        parts = weight.unflatten(1, (-1, 32))
        minima = parts.amin(-1).half()
        scales = (parts.amax(-1) - minima.float()).div_((1 << bits) - 1).half()
        steps = scales.float()[..., None]
        numbers = torch.where(steps > 0, (parts - minima.float()[..., None]) / steps, 0)
        numbers = numbers.round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
        return cls.of_numbers(numbers.flatten(1), scales, minima, bits)

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


def in_halves(units: Tensor) -> Tensor:
    """uint8 [..., 32] below 16 → [..., 16], as `Blocks` of 4 bits have them."""
    return units[..., : UNIT // 2] | units[..., UNIT // 2 :] << 4


Form = Literal["e4m3", "int8", "uint8", "uint4", "e2m1"]
"""Of a number: float8_e4m3, whole ones with and without a sign, float4_e2m1."""
MIN_GROUP = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_TWICE_E2M1 = torch.tensor([int(12 + 2 * low) + 256 * int(12 + 2 * high) for high in _E2M1 for low in _E2M1]).short()
"""Of a byte, two numbers of it in a byte each: twice the number, and 12."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Numbers of a byte or half of one, in groups along I, as kernels for GPUs read them, and as experts wait for those
    for CPUs: weight = scale × number, plus a minimum where there is one. Experts have a dimension E in front."""

    form: Form
    numbers: Tensor
    """Bytes [..., O, I] of the form's type; of half a byte uint8 [..., O, I / 2], the lower one first."""
    scales: Tensor
    """[..., O, I / group]: float32; with minima float16; of e2m1 uint8, exponents of two biased by 127."""
    minima: Tensor | None = None
    """float16, of uint8 and uint4."""
    bias: Tensor | None = None

    @property
    def num_inputs(self) -> int:
        return self.numbers.shape[-1] * (2 if self.form in ("uint4", "e2m1") else 1)

    @property
    def group(self) -> int:
        """All inputs, or a power of two of at least `MIN_GROUP`."""
        return self.num_inputs // self.scales.shape[-1]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.numbers, self.scales, self.minima, self.bias) if part is not None)

    def floats(self) -> Tensor:
        """float32 [..., O, I]"""
        numbers = self.numbers
        if self.form in ("uint4", "e2m1"):
            numbers = _in_bytes(numbers)
        if self.form == "e2m1":
            numbers = torch.tensor(_E2M1, device=numbers.device)[numbers.int()]
        scales = self.scales.float()
        if self.form == "e2m1":
            scales = torch.ones_like(scales).ldexp_(self.scales.int() - 127)
        values = numbers.float().unflatten(-1, (-1, self.group)).mul_(scales[..., None])
        return (values if self.minima is None else values.add_(self.minima.float()[..., None])).flatten(-2)

    def through(self, move: Callable[[Tensor], Tensor]) -> "Grouped":
        """As of `Blocks`."""
        minima = None if self.minima is None else move(self.minima.contiguous())
        return replace(
            self, numbers=move(self.numbers.contiguous()), scales=move(self.scales.contiguous()), minima=minima
        )

    def __getitem__(self, rows: int | tuple[int | slice, slice]) -> "Grouped":
        """An expert, or some outputs of one or of several, without biases."""
        minima = None if self.minima is None else self.minima[rows]
        return Grouped(self.form, self.numbers[rows], self.scales[rows], minima)

    def in_bytes(self) -> "Grouped":
        """Of uint8 and uint4: the same weights with a byte for each number."""
        if self.form == "uint8":
            return self
        return replace(self, form="uint8", numbers=_in_bytes(self.numbers))

    def in_whole_numbers(self) -> "Grouped | None":
        """Of e2m1: the same weights as uint8, halves of 0 to 24 around 12; None where scales are too large for half
        precision. Of scales that are too small for it, all weights are below 4e-7 and become 0."""
        scales = torch.ones(self.scales.shape).ldexp_(self.scales.int() - 128).half()
        minima = scales * -12
        numbers = _TWICE_E2M1[self.numbers.int()].view(torch.uint8)
        return Grouped("uint8", numbers, scales, minima) if minima.isfinite().all() else None

    def with_bias(self, bias: Tensor | None) -> "Grouped":
        return replace(self, bias=bias)

    def in_groups(self, size: int) -> "Grouped":
        """The same weights in groups of a size that divides theirs."""
        if size == self.group:
            return self
        scales, minima = (
            None if x is None else x.repeat_interleave(self.group // size, -1) for x in (self.scales, self.minima)
        )
        assert scales is not None
        return replace(self, scales=scales, minima=minima)

    def by_expert(self, num_experts: int) -> "Grouped":
        """Of all experts' outputs, side by side: with a dimension in front; as it is where it has that."""
        if self.numbers.dim() == 3:
            return self
        numbers, scales, minima = (
            None if x is None else x.unflatten(0, (num_experts, -1)) for x in (self.numbers, self.scales, self.minima)
        )
        assert numbers is not None and scales is not None
        return replace(self, numbers=numbers, scales=scales, minima=minima)

    @classmethod
    def of_blocks(cls, blocks: Blocks) -> "Grouped":
        if blocks.bits == 8:
            return cls("uint8", blocks.numbers.flatten(1), blocks.scales, blocks.minima, blocks.bias)
        halves = blocks.numbers.contiguous().view(torch.int16)  # two neighbours; the first one's byte is the lower one
        pairs = torch.cat((halves & 0x0F0F, halves >> 4 & 0x0F0F), -1)
        numbers = pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)
        return cls("uint4", numbers.flatten(1), blocks.scales, blocks.minima, blocks.bias)

    @classmethod
    def joined(cls, parts: Sequence["Grouped"]) -> "Grouped | None":
        """Outputs side by side; None where the parts' forms differ."""
        first, group = parts[0], math.gcd(*(part.group for part in parts))
        if any(part.form != first.form for part in parts) or (group < MIN_GROUP and group != first.num_inputs):
            return None
        if len(parts) == 1:
            return first
        alike = [part.in_groups(group) for part in parts]
        minima = [part.minima for part in alike if part.minima is not None]
        return cls(
            first.form,
            torch.cat([part.numbers for part in alike], -2),
            torch.cat([part.scales for part in alike], -2),
            torch.cat(minima, -2) if minima else None,
        )


def _in_bytes(halves: Tensor) -> Tensor:
    """uint8 [..., n] → [..., 2 n]: the lower half of each byte, then the upper one."""
    wide = halves.short()
    return wide.bitwise_left_shift(4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)


Weight = Dense | Blocks | Grouped
