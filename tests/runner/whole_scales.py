"""What kernels for CPUs compute with blocks of whole numbers, as worker/kernels/native/whole_scales.h has it."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tests.kernels.levels import has_whole_scales
from tests.runner.rounding import rounded_rows, row_steps
from worker.kernels.weights import UNIT, Blocks

MIDDLE = 8


@dataclass(frozen=True, slots=True)
class WholeScales:
    """weight = unit × (scale × (number - 8) - 8 × minimum)"""

    units: Tensor
    """float64 [O], powers of two."""
    scales: Tensor
    """float64 [O, I / 32], whole numbers, as the others."""
    minima: Tensor
    numbers: Tensor
    """[O, I / 32, 32], counted from their middle."""

    @classmethod
    def of(cls, weight: Blocks) -> Self:
        scales, minima = (x.double().repeat_interleave(weight.block // UNIT, 1) for x in (weight.scales, weight.minima))
        minima = -(minima / MIDDLE + scales)
        mantissas, exponents = torch.frexp(torch.maximum(scales.abs(), minima.abs()).amax(1) / 32767)
        units = torch.ones_like(mantissas).ldexp(exponents - (mantissas == 0.5).int())
        scales, minima = (torch.round(x / units[:, None]) for x in (scales, minima))
        return cls(units, scales, minima, weight.in_bytes().double() - MIDDLE)

    def floats(self) -> Tensor:
        """float32 [O, I]"""
        values = self.scales[..., None] * self.numbers - MIDDLE * self.minima[..., None]
        return (values * self.units[:, None, None]).flatten(1).float()

    def product(self, x: Tensor) -> Tensor:
        """Of rows [T, I] → float64 [T, O]. What minima are multiplied by lies above a block's sum, which borrows one
        from it if it is below zero, and of every second number that is one more."""
        steps = row_steps(x)
        row = torch.round(x.unflatten(1, (-1, UNIT)) / steps).double()
        sums = torch.einsum("tbi,obi->tbo", row, self.numbers)
        of_row = row.sum(-1, keepdim=True)
        above = -MIDDLE * of_row + of_row.remainder(2) - (sums < 0).double()
        return ((sums * self.scales.T + above * self.minima.T) * steps.double()).sum(1) * self.units


def floats_as_kept(weight: Blocks) -> Tensor:
    """float32 [O, I]: as the level in use has them."""
    return WholeScales.of(weight).floats() if has_whole_scales(weight.bits) else weight.floats()


def product_as_kept(x: Tensor, weight: Blocks) -> Tensor:
    """float64 [T, O]: as the level in use computes it, but for the order in which floats are added."""
    if has_whole_scales(weight.bits):
        return WholeScales.of(weight).product(x)
    return rounded_rows(x).double() @ weight.floats().double().T
