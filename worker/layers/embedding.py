"""Token embedding and output head, both sharded over the vocabulary."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from worker.kernels.interface import (
    EMBEDDING,
    LINEAR,
    TABLE,
    EmbeddingSpec,
    LinearKernel,
    LinearSpec,
    PackedWeight,
    TableKernel,
)
from worker.kernels.weights import Dense
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape
from worker.loader.checkpoint import LazyTensor, WeightTarget
from worker.parallel.group import Group


class VocabularyShard:
    """This rank's rows of a [vocabulary, hidden] table; the last rank's may be padded with zeros."""

    def __init__(self, vocab_size: int, tp: Group) -> None:
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // tp.size)
        self.start = tp.rank * self.num_rows
        self.num_real = max(0, min(self.num_rows, vocab_size - self.start))

    def load(self, into: Tensor, tensor: LazyTensor) -> None:
        expect_shape(tensor, (self.vocab_size, into.shape[1]))
        into[: self.num_real].copy_(tensor.read(0, self.start, self.num_real))


class TokenEmbedding(WeightedLayer):
    def __init__(self, setup: LayerSetup, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._kernel = setup.kernels.choose(EMBEDDING, EmbeddingSpec(hidden_size), setup.dtype)
        self._tp, self._shard = setup.tp, VocabularyShard(vocab_size, setup.tp)
        self.weight: Tensor = torch.zeros(self._shard.num_rows, hidden_size, dtype=setup.dtype, device=setup.device)
        self._rows: Callable[[Tensor], Tensor] | None = None

    def read_from(self, rows: Callable[[Tensor], Tensor]) -> None:
        """From now on: the table is packed elsewhere, and its own copy is not needed any more."""
        self._rows = rows
        del self.weight

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {f"{path}.weight": lambda tensor: self._shard.load(self.weight, tensor)}

    def weights(self) -> Iterable[Tensor]:
        return [self.weight]

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], this rank's part of the sum over ranks: zeros where another has the token."""
        if self._rows is not None:
            return self._rows(ids)
        return self._kernel(ids, self.weight, self._shard.start if self._tp.size > 1 else None)


class OutputHead(WeightedLayer):
    """Logits. A tied head shares the embedding's weight; where no kernel reads a packed table both ways, the packed one
    is a second copy."""

    def __init__(
        self, setup: LayerSetup, vocab_size: int, hidden_size: int, tied_to: TokenEmbedding | None = None
    ) -> None:
        super().__init__()
        self._tp, self._shard, self._is_tied = setup.tp, VocabularyShard(vocab_size, setup.tp), tied_to is not None
        num_rows = self._shard.num_rows
        spec = LinearSpec(hidden_size, num_rows)
        self._kernel: LinearKernel = setup.kernels.choose(LINEAR, spec, setup.dtype)
        table = setup.kernels.find(TABLE, spec, setup.dtype) if setup.tp.size == 1 else None
        self._shared: tuple[TokenEmbedding, TableKernel] | None = None
        if tied_to is not None and table is not None:
            self._kernel, self._shared = table, (tied_to, table)
        self.weight: Tensor = (
            torch.zeros(num_rows, hidden_size, dtype=setup.dtype, device=setup.device)
            if tied_to is None
            else tied_to.weight
        )
        self._packed: PackedWeight = None

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {} if self._is_tied else {f"{path}.weight": lambda tensor: self._shard.load(self.weight, tensor)}

    def weights(self) -> Iterable[Tensor]:
        return [] if self._shared is not None else [self.weight]

    def pack(self) -> None:
        self._packed = self._kernel.pack(Dense(self.weight))
        if self._shared is not None:
            embedding, table = self._shared
            embedding.read_from(partial(table.rows, self._packed))
        del self.weight

    def forward(self, x: Tensor) -> Tensor | None:
        """[R, hidden] → [R, vocabulary] on rank 0, in the model's dtype; None on the others."""
        logits = self._tp.gather_last(self._kernel(x, self._packed))
        return logits if logits is None else logits[:, : self._shard.vocab_size]
