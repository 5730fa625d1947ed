"""A layer's weight on its way from the checkpoint to the kernel that packs it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from worker.kernels.weights import Blocks, Dense, Grouped
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import LazyTensor

Piece = Blocks | Grouped | Tensor
"""Of a layer's weight: some of its outputs."""


class LoadedWeight:
    """[out, in] of this rank, filled piece by piece. Pieces are numbers of the model's dtype; or what the checkpoint
    has, where that is kept; or, on a GPU that keeps blocks, cut into these at once, so that they take no more memory.
    Exact blocks become numbers when a kernel packs them, so that they take memory once."""

    def __init__(self, setup: LayerSetup, out_features: int, in_features: int) -> None:
        self.shape = (out_features, in_features)
        self._setup = setup
        self._quantization = setup.quantization_of(in_features, out_features)
        self._kind = setup.kind_of(in_features, out_features)
        self._pieces: dict[int, Piece] = {}
        """By first row: all, where there is no `dense`, else those that are exact blocks."""
        self._takes_exact = setup.device.type == "cpu" and setup.dtype == torch.float32
        self.dense: Tensor | None = None
        is_cut_later = self._quantization in ("int8", "int4") and self._kind is Blocks
        if self._quantization == "none" or is_cut_later:
            self.dense = torch.empty(self.shape, dtype=setup.dtype, device=setup.device)

    def load_rows(self, at: int, tensor: LazyTensor, start: int, length: int) -> None:
        """Rows `start ...` of a checkpoint's tensor become rows `at ...`."""
        if self.dense is None:
            self._pieces[at] = self._piece(tensor, 0, start, length)
            return
        exact = tensor.stored(0, start, length) if self._takes_exact else None
        if isinstance(exact, Blocks) and exact.is_exact:
            self._pieces[at] = exact
        else:
            self.dense[at : at + length].copy_(tensor.read(0, start, length))

    def load_columns(self, tensor: LazyTensor, start: int, length: int) -> None:
        if length == tensor.shape[1]:
            self.load_rows(0, tensor, 0, self.shape[0])
        elif self.dense is None:
            self._pieces[0] = self._piece(tensor, 1, start, length)
        else:
            self.dense.copy_(tensor.read(1, start, length))

    def clear_rows(self, at: int) -> None:
        """Those from `at` on are zeros."""
        if self.dense is not None:
            self.dense[at:].zero_()
        elif at < self.shape[0]:
            setup = self._setup
            zeros = torch.zeros(self.shape[0] - at, self.shape[1], dtype=setup.dtype, device=setup.device)
            self._pieces[at] = self._cut(zeros)

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        """With what `noise` leaves in a tensor, in place of a checkpoint's."""
        setup = self._setup
        dense = torch.empty(self.shape, dtype=setup.dtype, device=setup.device) if self.dense is None else self.dense
        noise(dense)
        if self.dense is None:
            self._pieces[0] = self._cut(dense)

    def tensors(self) -> Iterable[Tensor]:
        return [] if self.dense is None else [self.dense]

    def take(self, bias: Tensor | None) -> Dense | Blocks | Grouped:
        """All of it, for a kernel to pack; nothing stays here."""
        if self.dense is None:
            return self._take_pieces(bias)
        dense = Dense(self._take_dense(), bias)
        if self._quantization == "none":
            return dense
        return Blocks.of(dense.weight, 8 if self._quantization == "int8" else 4).with_bias(bias)

    def _piece(self, tensor: LazyTensor, dim: int, start: int, length: int) -> Piece:
        found = tensor.stored(dim, start, length) if self._quantization == "stored" else None
        if isinstance(found, Blocks) and self._kind is not None:
            return self._in_kind(found)
        if isinstance(found, Grouped) and self._kind is Grouped:
            return found
        return self._cut(tensor.read(dim, start, length))

    def _in_kind(self, blocks: Blocks) -> Blocks | Grouped:
        return Grouped.of_blocks(blocks) if self._kind is Grouped else blocks

    def _cut(self, values: Tensor) -> Piece:
        """Into blocks, where that is asked for."""
        if self._quantization == "stored":
            return values.to(self._setup.dtype)
        return self._in_kind(Blocks.of(values.float(), 8 if self._quantization == "int8" else 4))

    def _take_pieces(self, bias: Tensor | None) -> Dense | Blocks | Grouped:
        pieces = self._in_order()
        blocks = [piece for piece in pieces if isinstance(piece, Blocks)]
        if len(blocks) == len(pieces):
            return Blocks.joined(blocks).with_bias(bias)
        grouped = [piece for piece in pieces if isinstance(piece, Grouped)]
        joined = Grouped.joined(grouped) if len(grouped) == len(pieces) else None
        if joined is not None:
            return joined.with_bias(bias)
        dtype = self._setup.dtype
        return Dense(
            torch.cat([piece if isinstance(piece, Tensor) else piece.floats().to(dtype) for piece in pieces]), bias
        )

    def _in_order(self) -> list[Piece]:
        """By their rows."""
        pieces = [self._pieces[at] for at in sorted(self._pieces)]
        self._pieces.clear()
        return pieces

    def _take_dense(self) -> Tensor | Blocks:
        """With what came as exact blocks in it; or these, where there is nothing else."""
        assert self.dense is not None
        dense, self.dense = self.dense, None
        firsts = sorted(self._pieces)
        exact = [piece for piece in self._in_order() if isinstance(piece, Blocks)]
        if sum(len(piece.numbers) for piece in exact) == len(dense):
            return Blocks.joined(exact)
        for at, piece in zip(firsts, exact, strict=True):
            dense[at : at + len(piece.numbers)] = piece.floats()
        return dense
