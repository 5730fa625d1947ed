"""Quantised rows of GGUF files as `Blocks`, number for number.

The layouts are those of ggml-quants.h and ggml-common.h of https://github.com/ggml-org/ggml. Scales that a file has in
two parts (the K formats) are products, rounded to half precision.
"""

import mmap
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from worker.kernels.weights import UNIT, Blocks, in_halves
from worker.loader.gguf.types import TensorType as Type


def read_blocks(rows: np.ndarray, kind: Type) -> Blocks | None:
    """uint8 [O, bytes of a row], contiguous → the weights, which may be views of these rows and are not to be written
    to; None for a format that is not one of blocks."""
    reader = _READERS.get(kind)
    if reader is None:
        return None
    tensor = torch.from_numpy(np.asarray(_Rows(rows)))
    tensor.view(-1)[:: mmap.PAGESIZE].max()  # so that this thread waits for the disk, and not the one that packs
    return reader(tensor)


class _Rows:
    """Of a file that is mapped to be read alone, for torch, which has no tensors of that kind and would warn."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.__array_interface__ = {**rows.__array_interface__, "data": (rows.ctypes.data, False)}


def _halves(data: Tensor, at: int) -> Tensor:
    """The float16 at this byte of each block, which has an even number: [O, blocks, bytes] → [O, blocks], a view."""
    return data[..., at : at + 2].view(torch.float16)[..., 0]


def _nibbles(data: Tensor) -> Tensor:
    """[..., n] → [..., 2n]: the lower halves of all bytes, then the upper ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _blocks(units: Tensor, scales: Tensor, minima: Tensor, bits: int) -> Blocks:
    """Of numbers as `Blocks` has them, blocks' side by side. Scales and minima that are in half precision already are
    exact, unless they are too large for it."""
    is_exact = minima.dtype is torch.float16 and bool(minima.isfinite().all())
    scales, minima = (x.half().flatten(1) for x in (scales, minima))
    return Blocks(units, scales, minima, bits, is_exact=is_exact)


def _of_bytes(numbers: Tensor, scales: Tensor, minima: Tensor) -> Blocks:
    """Of 8 bits, [O, ...] in the order of the inputs."""
    return _blocks(numbers.flatten(1).unflatten(1, (-1, UNIT)), scales, minima, 8)


def _q4_0(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 18))
    scales = _halves(data, 0)
    return _blocks(data[..., 2:], scales, scales * -8, 4)


def _q4_1(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 20))
    return _blocks(data[..., 4:], _halves(data, 0), _halves(data, 2), 4)


def _fifth_bits(data: Tensor) -> Tensor:
    """uint8 [..., 4] → [..., 32]: 16 where the bit is set."""
    bits = (data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q5_0(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 22))
    scales = _halves(data, 0)
    return _of_bytes(_nibbles(data[..., 6:]) | _fifth_bits(data[..., 2:6]), scales, scales * -16)


def _q5_1(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 24))
    return _of_bytes(_nibbles(data[..., 8:]) | _fifth_bits(data[..., 4:8]), _halves(data, 0), _halves(data, 2))


def _q8_0(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 34))
    scales = _halves(data, 0)
    return _of_bytes(data[..., 2:] ^ 128, scales, scales * -128)


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: scales and minima of the 8 blocks of each super-block, [O, super-blocks, 8] in float32."""
    packed = data[..., 4:16]
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -1)
    whole, least = (_halves(data, at).float()[..., None] for at in (0, 2))
    return whole * scales, -least * minima


def _q4_k(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 144))
    pairs = data[..., 16:].unflatten(-1, (4, 32))
    units = torch.stack((in_halves(pairs & 15), in_halves(pairs >> 4)), -2)
    return _blocks(units.flatten(1, -2), *_k_scales(data), 4)


def _q5_k(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 176))
    numbers = _nibbles(data[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = (data[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _of_bytes((numbers | fifth << 4).flatten(2), *_k_scales(data))


def _q6_k(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 210))
    low = _nibbles(data[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (data[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    scales = _halves(data, 208).float()[..., None] * data[..., 192:208].view(torch.int8)
    return _of_bytes((low | high << 4).flatten(2), scales, scales.half().float() * -32)


_CRUMBS = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
"""Where the two bits of a byte's four numbers begin, which are of four blocks of 32 bytes' numbers."""


def _q2_k(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 84))
    numbers = (data[..., 16:80].unflatten(-1, (2, 1, 32)) >> _CRUMBS) & 3
    scales = _halves(data, 80).float()[..., None] * (data[..., :16] & 15)
    minima = -_halves(data, 82).float()[..., None] * (data[..., :16] >> 4)
    return _of_bytes(numbers.flatten(2), scales, minima)


def _q3_k(rows: Tensor) -> Blocks:
    """Numbers of 0 to 7 around 4, their third bits apart from the others; scales of 0 to 63 around 32, as well."""
    data = rows.unflatten(1, (-1, 110))
    numbers = ((data[..., 32:96].unflatten(-1, (2, 1, 32)) >> _CRUMBS) & 3).flatten(-3, -2)
    third = (data[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    low = torch.cat((data[..., 96:104] & 15, data[..., 96:104] >> 4), -1)
    high = (data[..., None, 104:108] >> _CRUMBS) & 3
    factors = (low | high.flatten(-2) << 4).float() - 32
    scales = (_halves(data, 108).float()[..., None] * factors).half()
    return _of_bytes((numbers | third << 2).flatten(2), scales, scales.float() * -4)


_IQ4 = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
"""What the sixteen numbers of the IQ4 formats mean, and 128."""


def _iq4_nl(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 18))
    scales = _halves(data, 0)
    return _of_bytes(_IQ4[_nibbles(data[..., 2:]).int()], scales, scales * -128)


def _iq4_xs(rows: Tensor) -> Blocks:
    data = rows.unflatten(1, (-1, 136))
    low = torch.stack((data[..., 4:8] & 15, data[..., 4:8] >> 4), -1).flatten(-2)
    high = ((data[..., 2:4, None] >> _CRUMBS[:, 0]) & 3).flatten(-2)
    scales = (_halves(data, 0).float()[..., None] * ((low | high << 4).float() - 32)).half()
    numbers = _IQ4[_nibbles(data[..., 8:].unflatten(-1, (8, 16))).int()]
    return _of_bytes(numbers.flatten(2), scales, scales.float() * -128)


_READERS: dict[Type, Callable[[Tensor], Blocks]] = {
    Type.Q4_0: _q4_0, Type.Q4_1: _q4_1, Type.Q5_0: _q5_0, Type.Q5_1: _q5_1, Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k, Type.Q3_K: _q3_k, Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k,
    Type.IQ4_NL: _iq4_nl, Type.IQ4_XS: _iq4_xs,
}  # fmt: skip
