"""Linear layers. Each allocates this rank's shard, knows how to load it and hands it to its kernel once loaded."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from worker.kernels.elementwise import GATED_ACTIVATION, Activation, ActivationSpec
from worker.kernels.linear import LINEAR, LinearSpec, PackedWeight
from worker.layers.loaded import LoadedWeight
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape, sibling
from worker.loader.checkpoint import LazyTensor, WeightTarget
from worker.parallel.group import Group
from worker.parallel.symmetric import Inboxes


class LinearBase(WeightedLayer):
    """y = x Wᵀ + b over this rank's shard, [out, in]."""

    is_gated: ClassVar[bool] = False

    def __init__(self, setup: LayerSetup, out_features: int, in_features: int, bias: bool) -> None:
        super().__init__()
        self._setup, self._spec = setup, LinearSpec(in_features, out_features)
        self._kernel = setup.kernels.choose(LINEAR, self._spec, setup.dtype)
        self.weight = LoadedWeight(setup, out_features, in_features)
        self.bias: Tensor | None = torch.zeros(out_features, dtype=setup.dtype, device=setup.device) if bias else None
        self._packed: PackedWeight = None

    def weights(self) -> Iterable[Tensor]:
        return self.weight.tensors() if self.bias is None else [*self.weight.tensors(), self.bias]

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        self.weight.fill(noise)

    @property
    def packed(self) -> PackedWeight:
        """What the kernel made of the weights."""
        return self._packed

    def pack(self) -> int:
        weight = self.weight.take(self.bias)
        self._kernel = self._setup.kernels.choose(LINEAR, replace(self._spec, kind=type(weight)), self._setup.dtype)
        self._packed = self._kernel.pack(weight)
        del self.bias
        return weight.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out] of this rank."""
        return self._kernel(x, self._packed)

    def of_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(this layer of norm(residual + x), residual + x), in one operation where the kernel can; x and residual as in
        `RMSNorm.add_norm`."""
        if norm.is_of_one_rank:
            found = self._kernel.of_norm(x, residual, norm.weight, norm.eps, self._packed, is_gated=self.is_gated)
            if found is not None:
                return found
        x, residual = norm.add_norm(x, residual)
        return self(x), residual


class MergedColumnLinear(LinearBase):
    """Several projections of one input as one product; outputs are side by side, each sharded over the ranks.

    `parts`: checkpoint name of each projection (beside this layer in the tree) → (number of units, output features a
    unit). Units are what is dealt out to ranks: heads, or single features. Fewer units than ranks are replicated.
    """

    def __init__(
        self, setup: LayerSetup, in_features: int, parts: dict[str, tuple[int, int]], bias: bool = False
    ) -> None:
        self._shards: dict[str, tuple[int, int, int, int]] = {}
        """Name → (row of this rank's weight, first row of the whole, number of rows, rows of the whole)."""
        at = 0
        for name, (units, width) in parts.items():
            start, count = shard_or_copy(units, setup.tp, name)
            self._shards[name] = (at, start * width, count * width, units * width)
            at += count * width
        super().__init__(setup, at, in_features, bias)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        for name in self._shards:
            targets[f"{sibling(path, name)}.weight"] = partial(self._load_weight, name)
            if self.bias is not None:
                targets[f"{sibling(path, name)}.bias"] = partial(self._load_bias, self.bias, name)
        return targets

    def _load_weight(self, name: str, tensor: LazyTensor) -> None:
        at, start, length, total = self._shards[name]
        expect_shape(tensor, (total, self._spec.in_features))
        self.weight.load_rows(at, tensor, start, length)

    def _load_bias(self, into: Tensor, name: str, tensor: LazyTensor) -> None:
        at, start, length, total = self._shards[name]
        expect_shape(tensor, (total,))
        into[at : at + length].copy_(tensor.read(0, start, length))


class GatedLinear(MergedColumnLinear):
    """activation(gate) × up of the two projections gate and up: [T, in] → [T, out / 2]."""

    is_gated = True

    def __init__(
        self,
        setup: LayerSetup,
        in_features: int,
        parts: dict[str, tuple[int, int]],
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__(setup, in_features, parts, bias)
        spec = ActivationSpec(self.weight.shape[0] // 2, activation)
        self.activation = activation
        self._activate = setup.kernels.choose(GATED_ACTIVATION, spec, setup.dtype)

    def forward(self, x: Tensor) -> Tensor:
        gated = self._kernel.gated(x, self._packed) if self.activation == "silu" else None
        return self._activate(super().forward(x)) if gated is None else gated

    def of_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.activation == "silu":
            return super().of_norm(norm, x, residual)
        x, residual = norm.add_norm(x, residual)
        return self(x), residual


class RowLinear(LinearBase):
    """A projection whose input is sharded over the ranks: each computes a part of the sum.

    Whoever takes the result adds the parts up: the norm that follows can do that in its own operation. It is valid
    until the second next such product (see `Group.place`).
    """

    def __init__(self, setup: LayerSetup, units: int, unit_width: int, out_features: int, bias: bool = False) -> None:
        start, count = shard_of(units, setup.tp, "input")
        super().__init__(setup, out_features, count * unit_width, bias)
        self._tp, self._out_features = setup.tp, out_features
        self._start, self._total = start * unit_width, units * unit_width
        self._inboxes: Inboxes | None = None

    def send_parts(self) -> None:
        """From now on, to the other ranks at once where the kernel can: whoever takes the result is a norm of this
        model's dtype that takes parts, and takes it before the next one is computed."""
        self._inboxes = self._tp.inboxes

    def forward(self, x: Tensor) -> Tensor:
        """[T, in of this rank] → this rank's part of [T, out]."""
        if self._inboxes is not None and (sent := self._kernel.sent(x, self._packed, self._inboxes)) is not None:
            return sent
        place = self._tp.place(*x.shape[:-1], self._out_features, dtype=x.dtype)
        return self._kernel(x, self._packed, place)

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {f"{path}.weight": self._load_weight}
        if self.bias is not None:
            targets[f"{path}.bias"] = self._load_bias
        return targets

    def _load_weight(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, (self._out_features, self._total))
        self.weight.load_columns(tensor, self._start, self._spec.in_features)

    def _load_bias(self, tensor: LazyTensor) -> None:
        """On rank 0 alone, or the sum over ranks would hold it several times."""
        assert self.bias is not None
        expect_shape(tensor, tuple(self.bias.shape))
        if self._tp.rank == 0:
            self.bias.copy_(tensor.read())


def shard_of(units: int, tp: Group, what: str) -> tuple[int, int]:
    """(first unit, number of units) of this rank. Each unit is on one rank alone: what is made of it may be summed."""
    count = tp.share(units, f"units of {what}")
    return tp.rank * count, count


def shard_or_copy(units: int, tp: Group, what: str) -> tuple[int, int]:
    """The same of what is no part of a sum, such as keys and values: fewer units than ranks are each on several."""
    if units >= tp.size:
        return shard_of(units, tp, what)
    if tp.size % units:
        raise ValueError(f"{units} units of {what} cannot be shared by {tp.size} tensor-parallel ranks")
    return tp.rank // (tp.size // units), 1
