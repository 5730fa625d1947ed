"""The weight of a rank's experts on its way from the checkpoint to the kernel that packs it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from worker.kernels.weights import Blocks, Dense, Grouped
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import LazyTensor

Piece = Grouped | Tensor
"""Some outputs, of one expert [rows, in] or of all [experts, rows, in]."""


class LoadedExperts:
    """[experts, out, in] of this rank, filled piece by piece: numbers of the model's dtype or, where weights are kept
    as stored, pieces as the checkpoint has them."""

    def __init__(self, setup: LayerSetup, num_experts: int, out: int, inputs: int, *, keeps_stored: bool) -> None:
        self._setup, self._shape, self._keeps_stored = setup, (num_experts, out, inputs), keeps_stored
        self._pieces: dict[tuple[int, int], Piece] = {}
        """By expert and first row; of all experts: by the first one's number."""
        self._dense: Tensor | None = None if keeps_stored else self._empty()

    def load(self, expert: int, at: int, tensor: LazyTensor, dim: int, start: int, length: int) -> None:
        """A slice of one expert's tensor [out, in] becomes its rows `at ...`."""
        if self._dense is None:
            found = self.stored(tensor, dim, start, length)
            values = tensor.read(dim, start, length).to(self._setup.dtype) if found is None else found
            self._pieces[expert, at] = values
        else:
            values = tensor.read(dim, start, length)
            self._dense[expert, at : at + len(values)].copy_(values)

    def put(self, at: int, values: Piece) -> None:
        """Rows `at ...` of all experts."""
        if self._dense is None:
            self._pieces[0, at] = values if isinstance(values, Grouped) else values.to(self._setup.dtype)
        else:
            assert isinstance(values, Tensor)
            self._dense[:, at : at + values.shape[1]].copy_(values)

    def stored(self, tensor: LazyTensor, dim: int, start: int, length: int) -> Grouped | None:
        """A slice of a tensor, of one expert or of all, as the checkpoint has it, where that is kept."""
        found = tensor.stored(dim, start, length) if self._keeps_stored else None
        return Grouped.of_blocks(found) if isinstance(found, Blocks) else found

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        dense = self._empty() if self._dense is None else self._dense
        noise(dense)
        if self._dense is None:
            self._pieces[0, 0] = dense

    def tensors(self) -> Iterable[Tensor]:
        return [] if self._dense is None else [self._dense]

    def take(self, bias: Tensor | None) -> Dense | Grouped:
        """All of it, for a kernel to pack; nothing stays here."""
        if self._dense is not None:
            dense, self._dense = self._dense, None
            return Dense(dense, bias)
        pieces = [self._pieces[place] for place in sorted(self._pieces)]
        self._pieces.clear()
        grouped = [piece for piece in pieces if isinstance(piece, Grouped)]
        joined = Grouped.joined(grouped) if len(grouped) == len(pieces) else None
        if joined is not None:
            return joined.by_expert(self._shape[0]).with_bias(bias)
        dtype = self._setup.dtype
        floats = [piece if isinstance(piece, Tensor) else piece.floats().to(dtype) for piece in pieces]
        return Dense(torch.cat(floats, -2).view(self._shape), bias)

    def _empty(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._setup.dtype, device=self._setup.device)
