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

PLAIN, BYTES, E4M3, UINT4, E2M1, CENTRED = (tl.constexpr(number) for number in range(6))
"""PLAIN: of the activations' type. BYTES: of a type that the device converts. From UINT4 on: halves of bytes.
CENTRED: of whole numbers around a whole zero point, whose scale is for sums (see `weight_tile`)."""
INPUTS = 32
"""Whose multiples layers must have: the smallest blocks have as many."""
MIN_CENTRED = 128
"""Inputs of a group, that a piece may be of one."""
_HALVES: dict[Form, tl.constexpr] = {"uint4": UINT4, "e2m1": E2M1}


class PackedGrouped(NamedTuple):
    numbers: Tensor
    """[..., O, I] or, of half a byte, [..., O, I / 2], the lower one first."""
    scales: Tensor
    """[..., O, I / group]: float32; exponents of two, uint8; or int32: a scale and a minimum above it, float16, or, if
    CENTRED, a scale and a zero point, int16."""
    bias: Tensor | None
    form: int
    group: int
    """0: all inputs."""
    has_minima: bool


def pack_grouped(weight: Grouped, machine: Machine, *, may_centre: bool) -> PackedGrouped:
    """`may_centre`: halves may be CENTRED. Waits for the device."""
    numbers, scales = weight.numbers.contiguous(), weight.scales.contiguous()
    form = _HALVES.get(weight.form, BYTES)
    may_centre = may_centre and weight.form == "uint4" and weight.group >= MIN_CENTRED
    if may_centre and (zeros := _whole_zeros(weight)) is not None:
        halves = scales, zeros.view(torch.float16)
        scales = torch.stack(halves, -1).view(torch.int32)[..., 0]
        return PackedGrouped(_in_words(numbers), scales, weight.bias, CENTRED.value, weight.group, False)
    if weight.form == "e4m3" and not machine.has_float8:
        numbers, form = numbers.view(torch.uint8), E4M3
    if weight.minima is not None:
        scales = torch.stack((scales, weight.minima), -1).view(torch.int32)[..., 0]
    is_of_row = weight.scales.shape[-1] == 1 and weight.form in ("e4m3", "int8")
    group = 0 if is_of_row else weight.group
    return PackedGrouped(numbers, scales, weight.bias, form.value, group, weight.minima is not None)


def _whole_zeros(weight: Grouped) -> Tensor | None:
    """int16, as scales: the numbers that stand for zero; None where not all are whole, but for the rounding of minima,
    and from 0 to 15."""
    assert weight.minima is not None
    exact = (-weight.minima.float() / weight.scales.float()).nan_to_num_(0)
    zeros = exact.round()
    is_whole = ((exact - zeros).abs() < 0.02) & (zeros >= 0) & (zeros < 16)
    return zeros.to(torch.int16) if bool(is_whole.all()) else None


def _in_words(numbers: Tensor) -> Tensor:
    """Of four bytes the lower halves first, then the upper ones: as registers have them."""
    apart = torch.stack((numbers & 15, numbers >> 4), -1).unflatten(-2, (-1, 4)).flatten(-2).unflatten(-1, (2, 4))
    return (apart[..., 0, :] | apart[..., 1, :] << 4).flatten(-2)


@triton.jit
def weight_tile(
    numbers, scales, row, start, K, PIECE: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    HAS_MINIMA: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """([rows, PIECE] in TYPE, of these rows, int64 [rows], and the inputs from `start`, of K, which pieces fill; what
    products with it are multiplied by, float32 [rows], or 1). Without the scale of whole rows (GROUP 0): see
    `row_scale`. If CENTRED, a piece is of one group."""
    SHARE: tl.constexpr = 2 if FORM >= UINT4 else 1
    WIDTH: tl.constexpr = PIECE // SHARE
    at = start // SHARE + tl.arange(0, WIDTH)[None, :]
    found = tl.load(numbers + row[:, None] * (K // SHARE) + at)
    factor = 1.0
    if GROUP == 0:
        tile = _number(found, FORM).to(TYPE)
    elif FORM == CENTRED:
        pair = tl.load(scales + row * (K // GROUP) + start // GROUP)
        factor = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        low, high = _centred(found, (pair >> 16)[:, None], TYPE)
        words: tl.constexpr = [found.shape[0], WIDTH // 4, 4]
        both = tl.join(tl.reshape(low, words), tl.reshape(high, words))
        tile = tl.reshape(tl.permute(both, (0, 1, 3, 2)), [found.shape[0], PIECE])
    else:
        scale, minimum = _scales(scales, row, start, K, PIECE, FORM, GROUP, HAS_MINIMA)
        if SHARE == 1:
            tile = _scaled(_number(found, FORM), scale, minimum, HAS_MINIMA).to(TYPE)
        else:
            low = _scaled(_number(found & 15, FORM), scale, minimum, HAS_MINIMA).to(TYPE)
            high = _scaled(_number(found >> 4, FORM), scale, minimum, HAS_MINIMA).to(TYPE)
            tile = tl.reshape(tl.join(low, high), [found.shape[0], PIECE])
    return tile, factor


@triton.jit
def _centred(found, zero, TYPE: tl.constexpr):
    """(lower halves, upper halves), less `zero`, int32 [rows, 1], in TYPE: exact."""
    if TYPE == tl.bfloat16:  # noqa: SIM300
        # 0x4300 is 128, whose last seven bits count ones: a number is or-ed into it, and 128 and zero are taken off.
        above = (-128.0 - zero.to(tl.float32)).to(tl.bfloat16)
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, first, second, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            lop3.b32 a, first, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, second, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 first, first, 4;
            shr.u32 second, second, 4;
            lop3.b32 c, first, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, second, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 first, $5;
            mov.b32 second, $6;
            fma.rn.bf16x2 $0, a, one, first;
            fma.rn.bf16x2 $1, b, one, second;
            fma.rn.bf16x2 $2, c, one, first;
            fma.rn.bf16x2 $3, d, one, second;
            }""",
            "=r,=r,=r,=r,r,r,r", [found, above], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = ((found & 15).to(tl.int32) - zero).to(TYPE)
        high = ((found >> 4).to(tl.int32) - zero).to(TYPE)
    return low, high


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
