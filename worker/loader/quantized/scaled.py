"""Weights of one byte, which scales multiply: DeepSeek's blocks, and the tensors and rows of compressed-tensors."""

import torch
from torch import Tensor

from worker.kernels.weights import MIN_GROUP, Grouped, power_of_two_in
from worker.loader.quantized.parts import Parts
from worker.loader.quantized.schemes import Scaled

WEIGHT, SCALE, INVERSE = "weight", "weight_scale", "weight_scale_inv"
PARTS = (WEIGHT, SCALE, INVERSE, "input_scale", "activation_scale", "output_scale", "input_scale_ub")
"""The last ones are about activations, which are not rounded."""


class ScaledTensor:
    """Implements `LazyTensor`: float32, number × scale."""

    def __init__(self, parts: Parts, scheme: Scaled) -> None:
        """Raises ValueError, as the other methods do, too."""
        self._numbers = parts.tensor(WEIGHT)
        self._scales = parts.tensor(INVERSE if INVERSE in parts else SCALE)
        self._dtype = torch.float8_e4m3fn if scheme.is_float else torch.int8
        self.shape = self._numbers.shape
        self._block = self._block_of(scheme.block)

    def _block_of(self, block: tuple[int, int] | None) -> tuple[int, int]:
        """Outputs and inputs that share a scale."""
        if len(self.shape) != 2:
            raise ValueError(f"its shape is {self.shape}; two dimensions are needed")
        rows, columns = self.shape
        shape = self._scales.shape
        if block is not None:
            wanted = (-(-rows // block[0]), -(-columns // block[1]))
            if shape != wanted:
                raise ValueError(f"the shape of its scales is {shape}, blocks of {block} need {wanted}")
            return block
        if shape in ((), (1,), (1, 1)):
            return rows, columns
        if shape not in ((rows,), (rows, 1)):
            raise ValueError(f"the shape of its scales is {shape}, neither of the tensor nor of its {rows} rows")
        return 1, columns

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        numbers = self._numbers.read(dim, start, length)
        self._check(numbers)
        scales = self._scales.read().float()
        rows, columns = self._block
        by_row = scales.reshape(-(-self.shape[0] // rows), -1)
        of_rows, of_columns = (
            (torch.arange(size, device=numbers.device) + (start if at == dim else 0)) // share
            for at, (size, share) in enumerate(zip(numbers.shape, (rows, columns), strict=True))
        )
        return by_row.index_select(0, of_rows).index_select(1, of_columns).mul_(numbers.float())

    def stored(self, dim: int, start: int, length: int) -> Grouped | None:
        """A scale for each row, so that parts of a layer can be joined whatever their blocks of rows are."""
        rows, columns = self._block
        first, end = (start, start + length) if dim == 1 else (0, self.shape[1])
        group = end - first
        if columns < self.shape[1]:
            group = power_of_two_in(columns, first, end)
            if group < MIN_GROUP:
                return None
        numbers = self._numbers.read(dim, start, length)
        self._check(numbers)
        at_row = torch.arange(numbers.shape[0], device=numbers.device) + (start if dim == 0 else 0)
        at_column = torch.arange(first, end, group, device=numbers.device)
        scales = self._scales.read().float().reshape(-(-self.shape[0] // rows), -1)
        scales = scales.index_select(0, at_row // rows).index_select(1, at_column // columns)
        return Grouped("e4m3" if self._dtype.is_floating_point else "int8", numbers, scales)

    def _check(self, numbers: Tensor) -> None:
        if numbers.dtype != self._dtype:
            raise ValueError(f"it is stored as {numbers.dtype}; {self._dtype} is needed")
