"""Token embedding and output head, both sharded over the vocabulary."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from worker.kernels.elementwise import EMBEDDING, EmbeddingSpec
from worker.kernels.linear import LINEAR, TABLE, Finder, LinearKernel, LinearSpec, PackedWeight, TableKernel
from worker.kernels.weights import Dense, Weight
from worker.layers.loaded import LoadedWeight
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

    def load(self, into: LoadedWeight, tensor: LazyTensor) -> None:
        expect_shape(tensor, (self.vocab_size, into.shape[1]))
        into.load_rows(0, tensor, self.start, self.num_real)
        into.clear_rows(self.num_real)


class TokenEmbedding(WeightedLayer):
    def __init__(self, setup: LayerSetup, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._kernel = setup.kernels.choose(EMBEDDING, EmbeddingSpec(hidden_size), setup.dtype)
        self._setup, self._shard = setup, VocabularyShard(vocab_size, setup.tp)
        self._spec = LinearSpec(hidden_size, self._shard.num_rows)
        kind = setup.kind_of(hidden_size, self._shard.num_rows)
        is_table = kind is not None and setup.tp.size == 1 and self._find_table(kind) is not None
        of_weight = setup if is_table else replace(setup, quantization="none")
        self.weight = LoadedWeight(of_weight, self._shard.num_rows, hidden_size)
        self.table: TableKernel | None = None
        """What reads the packed table."""
        self.packed: PackedWeight = None
        self._plain: Tensor | None = None

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        return {f"{path}.weight": lambda tensor: self._shard.load(self.weight, tensor)}

    def weights(self) -> Iterable[Tensor]:
        return self.weight.tensors()

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        self.weight.fill(noise)

    def pack(self) -> int:
        """Where a kernel reads a packed table both ways, a tied head takes this one."""
        weight = self.weight.take(None)
        if self._setup.tp.size == 1:
            self.table = self._find_table(type(weight))
        if self.table is not None:
            self.packed = self.table.pack(weight)
        else:
            assert isinstance(weight, Dense)  # blocks are kept for tables alone
            self._plain = weight.weight
        return weight.num_bytes

    def _find_table(self, kind: type[Weight]) -> TableKernel | None:
        return self._setup.kernels.find(TABLE, replace(self._spec, kind=kind), self._setup.dtype)

    def plain(self) -> Tensor:
        """[rows, hidden], where no kernel reads it packed."""
        assert self._plain is not None
        return self._plain

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], this rank's part of the sum over ranks: zeros where another has the token."""
        if self.table is not None:
            return self.table.rows(self.packed, ids)
        return self._kernel(ids, self.plain(), self._first_token)

    def with_residual(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(as `forward`, a residual that has nothing in it yet, of the same shape)"""
        shape = ids.shape[0], self._spec.in_features
        residual = torch.empty(shape, dtype=self._setup.dtype, device=self._setup.device)
        if self.table is not None:
            residual.zero_()
            return self.table.rows(self.packed, ids), residual
        return self._kernel(ids, self.plain(), self._first_token, residual), residual

    @property
    def _first_token(self) -> int | None:
        """Of this rank's part of the table, where it is a part."""
        return self._shard.start if self._setup.tp.size > 1 else None


class OutputHead(WeightedLayer):
    """Logits. A tied head shares the embedding's weight; where no kernel reads a packed table both ways, and the
    head's packs a copy, that is a second one."""

    def __init__(
        self,
        setup: LayerSetup,
        vocab_size: int,
        hidden_size: int,
        tied_to: TokenEmbedding | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """`soft_cap` c: logits become c × tanh(logits / c)."""
        super().__init__()
        self._soft_cap = soft_cap
        self._setup, self._shard, self._tied_to = setup, VocabularyShard(vocab_size, setup.tp), tied_to
        self._is_padded = setup.tp.size * self._shard.num_rows > vocab_size
        self._spec = LinearSpec(hidden_size, self._shard.num_rows)
        self._kernel: LinearKernel = setup.kernels.choose(LINEAR, self._spec, setup.dtype)
        self.weight = LoadedWeight(setup, self._shard.num_rows, hidden_size) if tied_to is None else tied_to.weight
        self._packed: PackedWeight = None

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        if self._tied_to is not None:
            return {}
        return {f"{path}.weight": lambda tensor: self._shard.load(self.weight, tensor)}

    def weights(self) -> Iterable[Tensor]:
        return self.weight.tensors()

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        self.weight.fill(noise)

    def pack(self) -> int:
        """After the embedding that it is tied to."""
        tied_to, setup = self._tied_to, self._setup
        if tied_to is not None and tied_to.table is not None:
            self._kernel, self._packed = tied_to.table, tied_to.packed
            return 0
        weight = self.weight.take(None) if tied_to is None else Dense(tied_to.plain())
        self._kernel = setup.kernels.choose(LINEAR, replace(self._spec, kind=type(weight)), setup.dtype)
        self._packed = self._kernel.pack(weight)
        return weight.num_bytes if tied_to is None or self._kernel.copies else 0

    def forward(self, x: Tensor) -> Tensor | None:
        """[R, hidden] → [R, vocabulary] on rank 0, in the model's dtype; None on the others."""
        tp = self._setup.tp
        place = tp.gather_place(x.shape[0], self._shard.num_rows, x.dtype)
        logits = tp.gather_last(self._kernel(x, self._packed, place))
        if logits is None:
            return None
        if self._is_padded:
            logits = logits[:, : self._shard.vocab_size]
        return self._capped(logits)

    @property
    def is_shared(self) -> bool:
        """Whether every rank has some of the tokens."""
        return (self._setup.tp.size - 1) * self._shard.num_rows < self._shard.vocab_size

    @property
    def first_token(self) -> int:
        """Of this rank's."""
        return self._shard.start

    def part(self, x: Tensor) -> Tensor:
        """[R, hidden] → this rank's part of the logits, [R, tokens of this rank]."""
        return self._capped(self._kernel(x, self._packed)[:, : self._shard.num_real])

    def finder(self) -> Finder | None:
        """Of the greedy tokens of hidden states, [R, hidden]: where logits are the product as it is (a soft cap makes
        large ones equal), and all of it is here."""
        is_product = self._setup.tp.size == 1 and self._soft_cap is None
        return self._kernel.finder(self._packed) if is_product else None

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._soft_cap is None else logits.div(self._soft_cap).tanh_().mul_(self._soft_cap)
