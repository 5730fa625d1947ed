"""A layer's weight on its way from the checkpoint to the kernel that packs it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from worker.kernels.weights import Blocks, Dense
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import LazyTensor


class LoadedWeight:
    """[out, in] of this rank, filled piece by piece. Numbers of the model's dtype, or, where blocks are kept as stored,
    what the checkpoint has for each piece. Exact blocks become numbers when they are taken: so the numbers of one layer
    at a time take memory."""

    def __init__(self, setup: LayerSetup, out_features: int, in_features: int) -> None:
        self.shape = (out_features, in_features)
        self._quantization = setup.quantization_of(in_features, out_features)
        self._pieces: dict[int, Blocks | Tensor] = {}
        """By first row: all, where blocks are kept as stored, else those that are exact blocks."""
        self._takes_exact = setup.device.type == "cpu" and setup.dtype == torch.float32
        self.dense: Tensor | None = None
        if self._quantization != "stored":
            self.dense = torch.empty(self.shape, dtype=setup.dtype, device=setup.device)

    def load_rows(self, at: int, tensor: LazyTensor, start: int, length: int) -> None:
        """Rows `start ...` of a checkpoint's tensor become rows `at ...`."""
        if self.dense is not None:
            exact = tensor.blocks(start, length) if self._takes_exact else None
            if exact is not None and exact.is_exact:
                self._pieces[at] = exact
            else:
                self.dense[at : at + length].copy_(tensor.read(0, start, length))
            return
        blocks = tensor.blocks(start, length)
        self._pieces[at] = tensor.read(0, start, length).float() if blocks is None else blocks

    def load_columns(self, tensor: LazyTensor, start: int, length: int) -> None:
        if length == tensor.shape[1]:
            self.load_rows(0, tensor, 0, self.shape[0])
        else:
            assert self.dense is not None, "a rank that is alone has all columns"
            self.dense.copy_(tensor.read(1, start, length))

    def clear_rows(self, at: int) -> None:
        """Those from `at` on are zeros; a rank that is alone has none."""
        if self.dense is not None:
            self.dense[at:].zero_()

    def tensors(self) -> Iterable[Tensor]:
        return [] if self.dense is None else [self.dense]

    def take(self, bias: Tensor | None) -> Dense | Blocks:
        """All of it, for a kernel to pack; nothing stays here."""
        if self.dense is None:
            pieces = self._take_pieces()
            blocks = [piece for piece in pieces if isinstance(piece, Blocks)]
            if len(blocks) == len(pieces):
                return Blocks.joined(blocks).with_bias(bias)
            return Dense(torch.cat([piece.floats() if isinstance(piece, Blocks) else piece for piece in pieces]), bias)
        dense = self._take_dense()
        if self._quantization == "none":
            return Dense(dense, bias)
        return Blocks.of(dense, 8 if self._quantization == "int8" else 4).with_bias(bias)

    def _take_pieces(self) -> list[Blocks | Tensor]:
        """In the order of their rows."""
        pieces = [self._pieces[at] for at in sorted(self._pieces)]
        self._pieces.clear()
        return pieces

    def _take_dense(self) -> Tensor:
        """With what came as exact blocks in it."""
        assert self.dense is not None
        dense, self.dense = self.dense, None
        firsts = sorted(self._pieces)
        exact = [piece for piece in self._take_pieces() if isinstance(piece, Blocks)]
        if sum(len(piece.numbers) for piece in exact) == len(dense):
            return Blocks.joined(exact).floats()
        for at, piece in zip(firsts, exact, strict=True):
            dense[at : at + len(piece.numbers)] = piece.floats()
        return dense
