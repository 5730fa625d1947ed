"""Weights of a byte or half of one, as products read them: a tile of their rows, in the numbers of the activations.

What scales them is multiplied in float32, and the product is rounded once: a tile has what a weight that was put
together before would have.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.machine import Machine
from worker.kernels.weights import Form, Grouped

PLAIN, BYTES, E4M3, UINT4, E2M1 = (tl.constexpr(number) for number in range(5))
"""PLAIN: of the activations' type. BYTES: of a type that the device converts. From UINT4 on: halves of bytes."""
INPUTS = 32
"""Whose multiples layers must have: the smallest blocks have as many."""
_HALVES: dict[Form, tl.constexpr] = {"uint4": UINT4, "e2m1": E2M1}


class PackedGrouped(NamedTuple):
    numbers: Tensor
    """[..., O, I] or, of half a byte, [..., O, I / 2], the lower one first."""
    scales: Tensor
    """[..., O, I / group]: float32; exponents of two, uint8; or int32: a scale and a minimum above it, float16."""
    bias: Tensor | None
    form: int
    group: int
    """0: all inputs."""
    has_minima: bool


def pack_grouped(weight: Grouped, machine: Machine) -> PackedGrouped:
    numbers, scales = weight.numbers.contiguous(), weight.scales.contiguous()
    form = _HALVES.get(weight.form, BYTES)
    if weight.form == "e4m3" and not machine.has_float8:
        numbers, form = numbers.view(torch.uint8), E4M3
    if weight.minima is not None:
        scales = torch.stack((scales, weight.minima), -1).view(torch.int32)[..., 0]
    is_of_row = weight.scales.shape[-1] == 1 and weight.form in ("e4m3", "int8")
    group = 0 if is_of_row else weight.group
    return PackedGrouped(numbers, scales, weight.bias, form.value, group, weight.minima is not None)


@triton.jit
def weight_tile(
    numbers, scales, row, start, K, PIECE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    HAS_MINIMA: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """[rows, PIECE] in TYPE, of these rows, int64 [rows], and the inputs from `start`, of K, which pieces fill. Without
    the scale of whole rows (GROUP 0): see `row_scale`."""
    SHARE: tl.constexpr = 2 if FORM >= UINT4 else 1
    WIDTH: tl.constexpr = PIECE // SHARE
    at = start // SHARE + tl.arange(0, WIDTH)[None, :]
    found = tl.load(numbers + row[:, None] * (K // SHARE) + at)
    if GROUP == 0:
        tile = _number(found, FORM).to(TYPE)
    else:
        scale, minimum = _scales(scales, row, start, K, PIECE, FORM, GROUP, HAS_MINIMA)
        if SHARE == 1:
            tile = _scaled(_number(found, FORM), scale, minimum, HAS_MINIMA).to(TYPE)
        else:
            low = _scaled(_number(found & 15, FORM), scale, minimum, HAS_MINIMA).to(TYPE)
            high = _scaled(_number(found >> 4, FORM), scale, minimum, HAS_MINIMA).to(TYPE)
            tile = tl.reshape(tl.join(low, high), [found.shape[0], PIECE])
    return tile


@triton.jit
def row_scale(scales, row, GROUP: tl.constexpr):
    """float32 [rows]: what whole rows are multiplied by."""
    return tl.load(scales + row) if GROUP == 0 else tl.full([row.shape[0]], 1.0, tl.float32)


@triton.jit
def _number(found, FORM: tl.constexpr):
    """float32"""
    if FORM == E4M3:
        bits = found.to(tl.int32)
        # The exponent's bias is 7 in place of 127.
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    elif FORM == E2M1:
        bits = found.to(tl.int32)
        value = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    else:
        value = found.to(tl.float32)
    return value


@triton.jit
def _scales(
    scales, row, start, K, PIECE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr
):  # fmt: skip
    """(scales, minima) of a piece's groups, float32 [rows, groups]."""
    COUNT: tl.constexpr = (PIECE + GROUP - 1) // GROUP
    group = start // GROUP + tl.arange(0, COUNT)[None, :]
    found = tl.load(scales + row[:, None] * (K // GROUP) + group)
    if HAS_MINIMA:
        scale = (found & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = ((found >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = (found.to(tl.int32) << 23).to(tl.float32, bitcast=True) if FORM == E2M1 else found
        minimum = scale
    return scale, minimum


@triton.jit
def _scaled(values, scale, minimum, HAS_MINIMA: tl.constexpr):
    """values [rows, width] of as many groups, side by side, as scales and minima have columns."""
    ROWS: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    COUNT: tl.constexpr = scale.shape[1]
    apart = tl.reshape(values, [ROWS, COUNT, WIDTH // COUNT]) * scale[:, :, None]
    if HAS_MINIMA:
        apart += minimum[:, :, None]
    return tl.reshape(apart, [ROWS, WIDTH])
