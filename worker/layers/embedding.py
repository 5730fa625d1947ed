"""Token embedding and output head, both sharded over the vocabulary."""

import torch
from torch import Tensor, nn

from worker.kernels.interface import KernelBackend, PackedWeight
from worker.layers.linear import expect_shape
from worker.layers.parallel import TensorParallel
from worker.loader.checkpoint import LazyTensor, WeightTarget


class VocabularyShard:
    """This rank's rows of a [vocabulary, hidden] table; the last rank's may be padded with zeros."""

    def __init__(self, vocab_size: int, parallel: TensorParallel) -> None:
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // parallel.size)
        self.start = parallel.rank * self.num_rows
        self.num_real = max(0, min(self.num_rows, vocab_size - self.start))

    def load(self, into: Tensor, tensor: LazyTensor) -> None:
        expect_shape(tensor, (self.vocab_size, into.shape[1]))
        into[: self.num_real].copy_(tensor.read(0, self.start, self.num_real))


class VocabularyTable(nn.Module):
    """The weight of an embedding or of a head."""

    def __init__(self, kernels: KernelBackend, parallel: TensorParallel, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._kernels, self._parallel = kernels, parallel
        self.shard = VocabularyShard(vocab_size, parallel)
        self.weight: Tensor = torch.zeros(self.shard.num_rows, hidden_size, dtype=kernels.dtype, device=kernels.device)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {f"{prefix}weight": lambda tensor: self.shard.load(self.weight, tensor)}


class TokenEmbedding(VocabularyTable):
    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], complete on every rank."""
        if self._parallel.size == 1:
            return self._kernels.embedding(ids, self.weight)
        local = ids - self.shard.start
        foreign = (local < 0) | (local >= self.shard.num_real)
        rows = self._kernels.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._parallel.all_reduce(rows.masked_fill_(foreign[:, None], 0))


class OutputHead(VocabularyTable):
    """Logits. A tied head shares the embedding's weight; packed, it is a second copy in the kernels' layout."""

    def __init__(
        self, kernels: KernelBackend, parallel: TensorParallel, vocab_size: int, hidden_size: int,
        tied_to: TokenEmbedding | None,
    ) -> None:  # fmt: skip
        super().__init__(kernels, parallel, vocab_size, hidden_size if tied_to is None else 0)
        if tied_to is not None:
            self.weight = tied_to.weight
        self._packed: PackedWeight = None

    def pack(self) -> None:
        self._packed = self._kernels.pack_linear(self.weight, None)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden] → [R, vocabulary], complete on every rank, in the model's dtype."""
        logits = self._parallel.all_gather_last(self._kernels.linear(x, self._packed))
        return logits if logits.shape[-1] == self.shard.vocab_size else logits[:, : self.shard.vocab_size]
