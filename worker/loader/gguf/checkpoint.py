"""Checkpoint of a GGUF file under Hugging Face's names: dequantised as it is read."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.kernels.weights import Blocks
from worker.loader.config import ModelConfig
from worker.loader.errors import WeightsError
from worker.loader.gguf.blocks import read_blocks
from worker.loader.gguf.families import ARCHITECTURE, FAMILIES
from worker.loader.gguf.file import GGUFTensor
from worker.loader.gguf.parts import read_gguf_parts
from worker.loader.gguf.types import TensorType

_IN_CONFIG = {"rope_freqs.weight"}
_PLAIN_DTYPES = {TensorType.F32: np.float32, TensorType.F16: np.float16}


class GGUFCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._head_dim = config.head_dim
        file = read_gguf_parts(path, with_texts=False)
        self._family = FAMILIES[file.metadata[ARCHITECTURE]]
        self._tensors = dict(self._named(file.tensors))

    def _named(self, tensors: Mapping[str, GGUFTensor]) -> Iterator[tuple[str, GGUFTensor]]:
        """By Hugging Face's names, each expert's by themselves."""
        for name, tensor in tensors.items():
            if name in _IN_CONFIG:
                continue
            hf_name = self._family.hf_name(name)
            if "{}" in hf_name and len(tensor.shape) == 3:
                yield from ((hf_name.replace("{}", str(i)), part) for i, part in enumerate(tensor.parts()))
            else:
                yield hf_name, tensor

    def names(self) -> Iterable[str]:
        return self._tensors

    def tensor(self, name: str, packed: bool = False) -> "GGUFLazyTensor":
        head_dim = self._head_dim if self._family.pairs_neighbours(name) else None
        return GGUFLazyTensor(self._tensors[name], head_dim, self._family.offset(name))


class GGUFLazyTensor:
    """Implements `LazyTensor`. Slices of the first dimension dequantise only their rows. `paired_head_dim`: of heads
    whose rotary pairs are neighbours. `offset`: what the file adds to a vector."""

    def __init__(self, tensor: GGUFTensor, paired_head_dim: int | None, offset: float = 0.0) -> None:
        self._tensor = tensor
        self._head_dim = paired_head_dim
        self._offset = offset
        self.shape = tensor.shape

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        if len(self.shape) == 1:
            values = torch.from_numpy(rows_of(self._tensor, 0, 1).copy())[0] - self._offset
            values = self._to_neox(values[:, None], self._head_dim)[:, 0] if self._head_dim else values
            return values if length is None else values[start : start + length]
        if len(self.shape) != 2:
            raise WeightsError(f"GGUF tensors of {len(self.shape)} dimensions are not supported")
        if dim == 0:
            rows = self._rows(start, self.shape[0] if length is None else length)
            return self._to_neox(rows, self._head_dim) if self._head_dim else rows
        rows = self.read()
        return rows if length is None else rows[:, start : start + length]

    def stored(self, dim: int, start: int, length: int) -> Blocks | None:
        if len(self.shape) != 2:
            return None
        if dim == 1:
            whole = self.stored(0, 0, self.shape[0])
            return None if whole is None else whole.columns(start, length)
        found = read_blocks(stored_rows(self._tensor, start, length), self._tensor.type)
        if found is None or self._head_dim is None:
            return found
        order = torch.arange(length)[:, None]
        return found.select(self._to_neox(order, self._head_dim)[:, 0])

    def _rows(self, start: int, length: int) -> Tensor:
        return torch.from_numpy(rows_of(self._tensor, start, length).copy())

    @staticmethod
    def _to_neox(rows: Tensor, head_dim: int) -> Tensor:
        """Whole heads of rows, from neighbouring pairs to halves."""
        return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def stored_rows(tensor: GGUFTensor, start: int, length: int) -> np.ndarray:
    """uint8 [length, bytes of a row], a view of the mapped file."""
    rows = np.frombuffer(tensor.data, np.uint8).reshape(math.prod(tensor.shape[:-1]), -1)
    return rows[start : start + length]


def rows_of(tensor: GGUFTensor, start: int, length: int) -> np.ndarray:
    """Rows `start … start + length` as float32 (or float16 when stored so): [length, last dimension]."""
    rows = stored_rows(tensor, start, length)
    if tensor.type in _PLAIN_DTYPES:
        return rows.view(_PLAIN_DTYPES[tensor.type])
    from gguf.constants import GGMLQuantizationType  # a tenth of a second, and blocks that stay need nothing of it
    from gguf.quants import dequantize

    return dequantize(rows, GGMLQuantizationType(tensor.type))
