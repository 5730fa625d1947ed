"""Counter-based random numbers in tensor operations: no state, the same bits on every device."""

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""


def random_uniform(seeds: Tensor, positions: Tensor, stream: int, num: int) -> Tensor:
    """float64 [R, num] in (0, 1): element (r, i) is a function of (seeds[r], positions[r], stream, i) alone.

    seeds int64 [R] (the bits of an unsigned number), positions int64 [R].

    SplitMix64 in counter mode: its finaliser over key + i × golden ratio, where the key is mixed from seed, position
    and stream. 64-bit integer products wrap in two's complement, on the CPU and on CUDA alike.
    """
    key = _mix(_mix(seeds) + positions * _signed(_GOLDEN))
    key = _mix(key + _signed(_MIX_2 * (stream + 1)))
    counter = torch.arange(1, num + 1, device=seeds.device, dtype=torch.int64) * _signed(_GOLDEN)
    bits = _mix(key[:, None] + counter)
    # 52 bits, so that adding a half is exact: neither 0 nor 1 can come out.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
