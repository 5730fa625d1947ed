"""Linear layers. Each allocates this rank's shard, knows how to load it and hands it to the kernels once loaded."""

from functools import partial

import torch
from torch import Tensor, nn

from worker.kernels.interface import KernelBackend, PackedWeight
from worker.layers.parallel import TensorParallel
from worker.loader.checkpoint import LazyTensor, WeightTarget


class LinearBase(nn.Module):
    """y = x Wᵀ + b over this rank's shard, [out, in] of the whole given in `shape` by the subclass."""

    def __init__(self, kernels: KernelBackend, out_features: int, in_features: int, bias: bool) -> None:
        super().__init__()
        self.kernels = kernels
        dtype, device = kernels.dtype, kernels.device
        self.weight: Tensor = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias: Tensor | None = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.packed: PackedWeight = None

    def pack(self) -> None:
        """Call once, when loaded: the plain weight is gone afterwards."""
        self.packed = self.kernels.pack_linear(self.weight, self.bias)
        del self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.packed)


class MergedColumnLinear(LinearBase):
    """Several projections of one input as one product; outputs are side by side, each sharded over the ranks.

    `parts`: checkpoint name of each projection (its last component) → (number of units, output features a unit).
    Units are what is dealt out to ranks: heads, or single features. Fewer units than ranks are replicated.
    """

    def __init__(
        self,
        kernels: KernelBackend,
        parallel: TensorParallel,
        in_features: int,
        parts: dict[str, tuple[int, int]],
        bias: bool = False,
    ) -> None:
        self._shards: dict[str, tuple[int, int, int, int]] = {}
        at = 0
        for name, (units, width) in parts.items():
            start, count = shard_of(units, parallel, name)
            self._shards_add(name, at, start * width, count * width, units * width)
            at += count * width
        super().__init__(kernels, at, in_features, bias)

    def _shards_add(self, name: str, at: int, start: int, length: int, total: int) -> None:
        self._shards[name] = (at, start, length, total)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Targets of all parts; `prefix` is the path of the module that holds them in the checkpoint, with dot."""
        targets: dict[str, WeightTarget] = {}
        for name in self._shards:
            targets[f"{prefix}{name}.weight"] = partial(self._load, self.weight, name)
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = partial(self._load, self.bias, name)
        return targets

    def _load(self, into: Tensor, name: str, tensor: LazyTensor) -> None:
        at, start, length, total = self._shards[name]
        expect_shape(tensor, (total, *into.shape[1:]))
        into[at : at + length].copy_(tensor.read(0, start, length))


class RowLinear(LinearBase):
    """A projection whose input is sharded over the ranks: each computes a part of the sum."""

    def __init__(
        self, kernels: KernelBackend, parallel: TensorParallel, units: int, unit_width: int, out_features: int,
        bias: bool = False,
    ) -> None:  # fmt: skip
        start, count = shard_of(units, parallel, "input")
        super().__init__(kernels, out_features, count * unit_width, bias)
        self._parallel = parallel
        self._start, self._total = start * unit_width, units * unit_width

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {f"{prefix}weight": self._load_weight}
        if self.bias is not None:
            targets[f"{prefix}bias"] = self._load_bias
        return targets

    def _load_weight(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, (self.weight.shape[0], self._total))
        self.weight.copy_(tensor.read(1, self._start, self.weight.shape[1]))

    def _load_bias(self, tensor: LazyTensor) -> None:
        """On rank 0 alone, or the sum over ranks would hold it several times."""
        assert self.bias is not None
        expect_shape(tensor, tuple(self.bias.shape))
        if self._parallel.rank == 0:
            self.bias.copy_(tensor.read())

    def forward(self, x: Tensor) -> Tensor:
        return self._parallel.all_reduce(super().forward(x))


def shard_of(units: int, parallel: TensorParallel, what: str) -> tuple[int, int]:
    """(first unit, number of units) of this rank. Fewer units than ranks: each is held by several ranks."""
    if units < parallel.size:
        if parallel.size % units:
            raise ValueError(f"{units} units of {what} cannot be shared by {parallel.size} tensor-parallel ranks")
        return parallel.rank // (parallel.size // units), 1
    count = parallel.share(units, f"units of {what}")
    return parallel.rank * count, count


def expect_shape(tensor: LazyTensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"its shape is {tuple(tensor.shape)}, the model expects {shape}")
