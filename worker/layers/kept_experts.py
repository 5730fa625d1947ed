"""Experts that a CPU keeps in whole numbers, on their way from the checkpoint to the kernel that packs them."""

import math
import threading
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from worker.kernels.weights import Blocks, Dense, Grouped
from worker.layers.loaded_experts import Piece
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import LazyTensor

Place = tuple[int, int]
"""Expert, and first row."""


class KeptExperts:
    """As `LoadedExperts`: the blocks that a checkpoint has, float4_e2m1 as such, or blocks of so many bits, cut as
    numbers are read. They stand in one piece of memory from the start, so only the pieces in hand are ever in a larger
    form. Where a piece has no blocks, all of this weight become numbers of the model's dtype."""

    def __init__(
        self,
        setup: LayerSetup,
        num_experts: int,
        out: int,
        inputs: int,
        quantization: Literal["stored", "int8", "int4"],
    ) -> None:
        self._dtype, self._shape, self._quantization = setup.dtype, (num_experts, out, inputs), quantization
        self._lock = threading.Lock()  # of the next two's beginning: several threads read
        self._kept: Grouped | None = None
        self._dense: Tensor | None = None
        self._rows: dict[Place, int] = {}
        """How many stand in `_kept`."""
        self._others: dict[Place, Grouped] = {}
        """In another form than the first one had."""

    def load(self, expert: int, at: int, tensor: LazyTensor, dim: int, start: int, length: int) -> None:
        found = tensor.stored(dim, start, length) if self._quantization == "stored" else None
        if isinstance(found, Blocks):
            self._keep(expert, at, Grouped.of_blocks(found))
        else:
            self._put(expert, at, tensor.read(dim, start, length))

    def put(self, at: int, values: Piece) -> None:
        for expert in range(self._shape[0]):
            each = values[expert]
            if isinstance(each, Grouped):
                whole = each.in_whole_numbers()
                each = each.floats() if whole is None else whole
            if isinstance(each, Grouped):
                self._keep(expert, at, each)
            else:
                self._put(expert, at, each)

    def stored(self, tensor: LazyTensor, dim: int, start: int, length: int) -> Grouped | None:
        """Of all experts there are float4_e2m1 alone."""
        found = tensor.stored(dim, start, length) if self._quantization == "stored" else None
        return found if isinstance(found, Grouped) and found.form == "e2m1" else None

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        values = torch.empty(self._shape)
        noise(values)
        self.put(0, values)

    def tensors(self) -> Iterable[Tensor]:
        return []

    def take(self, bias: Tensor | None) -> Dense | Grouped:
        kept, others = self._kept, self._others
        if self._dense is not None:
            return Dense(self._take_dense(self._dense), bias)
        assert kept is not None
        if others:
            if any(each.form != kept.form for each in others.values()):
                kept, others = kept.in_bytes(), {place: each.in_bytes() for place, each in others.items()}
            group = math.gcd(kept.group, *(each.group for each in others.values()))
            kept = kept.in_groups(group)
            for place, each in others.items():
                _copy(kept, place, each.in_groups(group))
        return kept.with_bias(bias)

    def _take_dense(self, dense: Tensor) -> Tensor:
        for (expert, at), length in self._rows.items():
            assert self._kept is not None
            dense[expert, at : at + length] = self._kept[expert, at : at + length].floats()
        for (expert, at), each in self._others.items():
            dense[expert, at : at + len(each.numbers)] = each.floats()
        return dense

    def _put(self, expert: int, at: int, values: Tensor) -> None:
        if self._quantization != "stored":
            bits = 8 if self._quantization == "int8" else 4
            self._keep(expert, at, Grouped.of_blocks(Blocks.of(values.float(), bits)))
            return
        with self._lock:
            if self._dense is None:
                self._dense = torch.empty(self._shape, dtype=self._dtype)
        self._dense[expert, at : at + len(values)] = values

    def _keep(self, expert: int, at: int, piece: Grouped) -> None:
        with self._lock:
            if self._kept is None:
                self._kept = piece.through(lambda part: part.new_empty(*self._shape[:2], part.shape[-1]))
        if (piece.form, piece.group) == (self._kept.form, self._kept.group):
            _copy(self._kept, (expert, at), piece)
            self._rows[expert, at] = len(piece.numbers)
        else:
            self._others[expert, at] = piece


def _copy(whole: Grouped, place: Place, piece: Grouped) -> None:
    """Of one form."""
    expert, at = place
    rows = slice(at, at + len(piece.numbers))
    assert whole.minima is not None and piece.minima is not None
    whole.numbers[expert, rows] = piece.numbers
    whole.scales[expert, rows] = piece.scales
    whole.minima[expert, rows] = piece.minima
