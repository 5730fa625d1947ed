"""Whole numbers packed into words of 32 bits, in groups of inputs with a scale and a zero point for each output.

weight[o, i] = (number[o, i] − zero[o, group of i]) × scale[o, group of i]. The layouts are those of compressed-tensors
(https://github.com/vllm-project/compressed-tensors), AutoAWQ's GEMM (https://github.com/casper-hansen/AutoAWQ) and
AutoGPTQ (https://github.com/AutoGPTQ/AutoGPTQ); the last two store a weight's transpose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.weights import Blocks, power_of_two_in
from worker.loader.checkpoint import LazyTensor
from worker.loader.quantized.parts import Parts
from worker.loader.quantized.schemes import Awq, Gptq, PackedInt

WORD_BITS = 32
BLOCK = 32
"""Inputs of the smallest block of `Blocks` of any bits."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight neighbours stands, by 4 bits."""
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
                "input_scale", "output_scale")  # fmt: skip
AWQ_PARTS = ("qweight", "qzeros", "scales")
GPTQ_PARTS = (*AWQ_PARTS, "g_idx")


@dataclass(frozen=True, slots=True)
class Packed:
    """Numbers without a sign, of `bits` each, side by side in the words of a tensor's dimension `dim`."""

    words: LazyTensor
    """int32"""
    dim: int
    bits: int
    order: tuple[int, ...] | None = None
    """Place in its word of each of the numbers that share one; None: the first is lowest."""

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    def read(self, dim: int, start: int, length: int) -> Tensor:
        """uint8; the slice of dimension `dim`, in numbers; all words of the other dimension are whole."""
        if dim != self.dim:
            return self._unpacked(self.words.read(dim, start, length))
        first = start // self.per_word
        words = self.words.read(dim, first, -(-(start + length) // self.per_word) - first)
        return self._unpacked(words).narrow(dim, start - first * self.per_word, length)

    def _unpacked(self, words: Tensor) -> Tensor:
        if words.dtype != torch.int32:
            raise ValueError(f"its numbers are packed in {words.dtype}; torch.int32 is needed")
        places = torch.tensor(self.order or range(self.per_word), dtype=torch.int32, device=words.device) * self.bits
        along_last = words.movedim(self.dim, -1)
        numbers = (along_last[..., None] >> places) & ((1 << self.bits) - 1)
        return numbers.to(torch.uint8).flatten(-2).movedim(-1, self.dim)


@dataclass(slots=True)
class GroupedTensor:
    """Implements `LazyTensor`, in float32."""

    shape: tuple[int, ...]
    """(outputs, inputs)"""
    numbers: Packed
    scales: LazyTensor
    zeros: Packed | None
    """None: half of the range, and the number is one with a sign."""
    bits: int
    group_size: int
    groups: Tensor | None
    """int64 [inputs]: of each, where they are in no order."""
    outputs_dim: int
    """Of the stored tensors: 1 where they are transposed."""
    less_one: bool = False
    """Zero points are stored less one."""

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        length = self.shape[dim] - start if length is None else length
        rows = (start, length) if dim == 0 else (0, self.shape[0])
        numbers = self._by_output(self.numbers.read(self.outputs_dim ^ dim, start, length))
        scales, zeros = self._scales(*rows), self._zeros(*rows)
        columns = slice(start, start + length) if dim == 1 else slice(None)
        groups = self._groups(numbers.device)[columns]
        return (numbers.float() - zeros.index_select(1, groups)).mul_(scales.index_select(1, groups))

    def stored(self, dim: int, start: int, length: int) -> Blocks | None:
        """Minima are rounded to half precision. None for groups in no order, or that `Blocks` of no size fill, and for
        scales that half precision does not hold."""
        first, end = (start, start + length) if dim == 1 else (0, self.shape[1])
        block = power_of_two_in(self.group_size, first, end)
        if self.groups is not None or block < BLOCK:
            return None
        rows = (start, length) if dim == 0 else (0, self.shape[0])
        scales = self._scales(*rows)
        minima = (scales * -self._zeros(*rows)).half()
        if not torch.equal(scales.half().float(), scales) or not bool(minima.isfinite().all()):
            return None
        numbers = self._by_output(self.numbers.read(self.outputs_dim ^ dim, start, length))
        groups = torch.arange(first, end, block, device=numbers.device) // self.group_size
        scales, minima = scales.half().index_select(1, groups), minima.index_select(1, groups)
        return Blocks.of_numbers(numbers, scales, minima, self.bits)

    def _by_output(self, stored: Tensor) -> Tensor:
        return stored.T if self.outputs_dim == 1 else stored

    def _groups(self, device: torch.device) -> Tensor:
        if self.groups is not None:
            return self.groups.to(device)
        return torch.arange(self.shape[1], device=device) // self.group_size

    def _scales(self, start: int, length: int) -> Tensor:
        """float32 [outputs, groups]"""
        return self._by_output(self.scales.read(self.outputs_dim, start, length)).float()

    def _zeros(self, start: int, length: int) -> Tensor:
        """float32, as the scales, or a column of them."""
        if self.zeros is None:
            scales = self._scales(start, length)
            return torch.full_like(scales, 1 << (self.bits - 1))
        zeros = self._by_output(self.zeros.read(self.outputs_dim, start, length))
        if self.less_one:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)  # a zero point of none wraps around
        return zeros.float()


def packed_tensor(parts: Parts, scheme: PackedInt) -> GroupedTensor:
    """Of compressed-tensors. Raises ValueError."""
    words, scales, stated = parts.tensor("weight_packed"), parts.tensor("weight_scale"), parts.tensor("weight_shape")
    shape = tuple(stated.read().tolist())
    zeros = None if scheme.is_symmetric else Packed(parts.tensor("weight_zero_point"), 0, scheme.bits)
    order = parts.tensor("weight_g_idx") if "weight_g_idx" in parts else None
    numbers = Packed(words, 1, scheme.bits)
    return _grouped(shape, numbers, scales, zeros, scheme.bits, scheme.group_size, order, 0)


def awq_tensor(parts: Parts, scheme: Awq) -> GroupedTensor:
    """Raises ValueError."""
    words, zeros, scales = (parts.tensor(part) for part in AWQ_PARTS)
    numbers = Packed(words, 1, 4, AWQ_ORDER)
    shape = (scales.shape[-1], words.shape[0])
    return _grouped(shape, numbers, scales, Packed(zeros, 1, 4, AWQ_ORDER), 4, scheme.group_size, None, 1)


def gptq_tensor(parts: Parts, scheme: Gptq) -> GroupedTensor:
    """Raises ValueError."""
    words, zeros, scales = (parts.tensor(part) for part in AWQ_PARTS)
    numbers = Packed(words, 0, scheme.bits)
    shape = (scales.shape[-1], words.shape[0] * numbers.per_word)
    order = parts.tensor("g_idx") if "g_idx" in parts else None
    return _grouped(
        shape, numbers, scales, Packed(zeros, 1, scheme.bits), scheme.bits, scheme.group_size, order, 1,
        less_one=scheme.is_first_version,
    )  # fmt: skip


def _grouped(
    shape: tuple[int, ...], numbers: Packed, scales: LazyTensor, zeros: Packed | None, bits: int,
    group_size: int | None, order: LazyTensor | None, outputs_dim: int, *, less_one: bool = False,
) -> GroupedTensor:  # fmt: skip
    """Once all parts are found to be of one size. Raises ValueError."""
    if len(shape) != 2 or not all(size > 0 for size in shape):
        raise ValueError(f"its shape is said to be {shape}; two sizes are needed")
    outputs, inputs = shape
    size = inputs if group_size is None else group_size
    of_groups = (outputs, -(-inputs // size))
    _expect("numbers", numbers.words, shape, outputs_dim, numbers)
    _expect("scales", scales, of_groups, outputs_dim)
    if zeros is not None:
        _expect("zero points", zeros.words, of_groups, outputs_dim, zeros)
    groups = None if order is None else _order(order, inputs, size, of_groups[1])
    return GroupedTensor(shape, numbers, scales, zeros, bits, size, groups, outputs_dim, less_one)


def _expect(
    what: str, tensor: LazyTensor, shape: tuple[int, ...], outputs_dim: int, packed: Packed | None = None
) -> None:
    """`shape`: of outputs and inputs, in numbers. Raises ValueError."""
    wanted = [*shape] if outputs_dim == 0 else [*reversed(shape)]
    if packed is not None:
        wanted[packed.dim] = -(-wanted[packed.dim] // packed.per_word)
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"the shape of its {what} is {tuple(tensor.shape)}; {tuple(wanted)} is needed")


def _order(order: LazyTensor, inputs: int, size: int, num_groups: int) -> Tensor | None:
    """The group of each input; None where they come one after another. Raises ValueError."""
    groups = order.read().long()
    if groups.shape != (inputs,):
        raise ValueError(f"the shape of its order of groups is {tuple(groups.shape)}; {(inputs,)} is needed")
    plain = torch.arange(inputs, device=groups.device) // size
    if torch.equal(groups, plain) or bool((groups == -1).all()):  # −1: never set
        return None
    if not bool(((groups >= 0) & (groups < num_groups)).all()):
        raise ValueError(f"its order of groups names one beyond the {num_groups} that there are")
    return groups
