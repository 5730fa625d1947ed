"""Token embedding and output head, both sharded over the vocabulary."""

from collections.abc import Iterable

import torch
from torch import Tensor

from worker.kernels.interface import EMBEDDING, LINEAR, EmbeddingSpec, LinearSpec, PackedWeight
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

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {f"{path}.weight": lambda tensor: self._shard.load(self.weight, tensor)}

    def weights(self) -> Iterable[Tensor]:
        return [self.weight]

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], this rank's part of the sum over ranks: zeros where another has the token."""
        return self._kernel(ids, self.weight, self._shard.start if self._tp.size > 1 else None)


class OutputHead(WeightedLayer):
    """Logits. A tied head shares the embedding's weight; packed, it is a second copy in the kernel's layout."""

    def __init__(
        self, setup: LayerSetup, vocab_size: int, hidden_size: int, tied_to: TokenEmbedding | None = None
    ) -> None:
        super().__init__()
        self._tp, self._shard, self._is_tied = setup.tp, VocabularyShard(vocab_size, setup.tp), tied_to is not None
        num_rows = self._shard.num_rows
        self._kernel = setup.kernels.choose(LINEAR, LinearSpec(hidden_size, num_rows), setup.dtype)
        self.weight: Tensor = (
            torch.zeros(num_rows, hidden_size, dtype=setup.dtype, device=setup.device)
            if tied_to is None
            else tied_to.weight
        )
        self._packed: PackedWeight = None

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {} if self._is_tied else {f"{path}.weight": lambda tensor: self._shard.load(self.weight, tensor)}

    def weights(self) -> Iterable[Tensor]:
        return [self.weight]

    def pack(self) -> None:
        self._packed = self._kernel.pack(Dense(self.weight))
        del self.weight

    def forward(self, x: Tensor) -> Tensor | None:
        """[R, hidden] → [R, vocabulary] on rank 0, in the model's dtype; None on the others."""
        logits = self._tp.gather_last(self._kernel(x, self._packed))
        return logits if logits is None else logits[:, : self._shard.vocab_size]
