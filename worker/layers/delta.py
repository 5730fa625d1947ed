"""Gated DeltaNet layers (Qwen3-Next, Qwen3.5; Yang et al., arXiv 2412.06464): linear attention whose state is kept per
request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from worker.attention.context import current_context
from worker.attention.delta import DeltaCacheSpec
from worker.attention.interface import CacheLayer
from worker.kernels.delta import DELTA, GATED_NORM, DeltaParameters, DeltaSpec, DeltaState, GatedNormSpec
from worker.layers.linear import LinearBase, RowLinear
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import WeightedLayer, expect_shape, sibling
from worker.loader.checkpoint import LazyTensor, WeightTarget

StoredAs = Literal["by kind", "by key head"]
"""How checkpoints have the projections: one tensor for queries, keys and values, one after another, and others for
gates, b and a; or, one key head after another, a tensor with all of its q, k, v and gate, and one with b and a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Of the whole model, before sharding. Key heads are shared out to ranks, and value heads follow theirs."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads."""
    key_dim: int
    value_dim: int
    width: int
    """Tokens under the convolution."""
    norm_eps: float
    stored_as: StoredAs

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a checkpoint's tensor that become rows of this rank's."""

    at: int
    start: int
    length: int


class DeltaProjection(LinearBase):
    """Queries, keys, values, gates, b and a of this rank's heads, side by side in this order."""

    def __init__(self, setup: LayerSetup, shape: DeltaShape, spec: DeltaSpec, first_head: int) -> None:
        """`first_head`: this rank's first key head."""
        num_heads = spec.num_value_heads
        super().__init__(setup, spec.num_channels + spec.value_size + 2 * num_heads, shape.hidden_size, bias=False)
        self._shape, self._local, self._first = shape, spec, first_head

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        pieces = self._pieces_by_kind() if self._shape.stored_as == "by kind" else self._pieces_by_head()
        return {
            f"{sibling(path, name)}.weight": partial(self._load, num_rows, found)
            for name, (num_rows, found) in pieces.items()
        }

    def _load(self, num_rows: int, pieces: list[_Piece], tensor: LazyTensor) -> None:
        expect_shape(tensor, (num_rows, self._shape.hidden_size))
        for piece in pieces:
            self.weight.load_rows(piece.at, tensor, piece.start, piece.length)

    def _pieces_by_kind(self) -> dict[str, tuple[int, list[_Piece]]]:
        """Tensor → (its rows, those of this rank)."""
        shape, local, part = self._shape, self._local, self._first / self._shape.num_key_heads
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
        heads, channels = local.num_value_heads, local.num_channels
        at_b = channels + local.value_size

        def piece(at: int, start: int, total: int, length: int) -> _Piece:
            return _Piece(at, start + round(part * total), length)

        qkv = [
            piece(0, 0, keys, local.key_size),
            piece(local.key_size, keys, keys, local.key_size),
            piece(2 * local.key_size, 2 * keys, values, local.value_size),
        ]
        return {
            "in_proj_qkv": (shape.num_channels, qkv),
            "in_proj_z": (values, [piece(channels, 0, values, local.value_size)]),
            "in_proj_b": (shape.num_value_heads, [piece(at_b, 0, shape.num_value_heads, heads)]),
            "in_proj_a": (shape.num_value_heads, [piece(at_b + heads, 0, shape.num_value_heads, heads)]),
        }

    def _pieces_by_head(self) -> dict[str, tuple[int, list[_Piece]]]:
        shape, local = self._shape, self._local
        group = shape.num_value_heads // shape.num_key_heads
        at_b = local.num_channels + local.value_size
        # (first row of this rank's, rows of a key head), in the order in which a head has them.
        qkvz = [
            (0, shape.key_dim),
            (local.key_size, shape.key_dim),
            (2 * local.key_size, group * shape.value_dim),
            (local.num_channels, group * shape.value_dim),
        ]
        ba = [(at_b, group), (at_b + local.num_value_heads, group)]
        return {"in_proj_qkvz": self._pieces_of_heads(qkvz), "in_proj_ba": self._pieces_of_heads(ba)}

    def _pieces_of_heads(self, parts: list[tuple[int, int]]) -> tuple[int, list[_Piece]]:
        width = sum(length for _, length in parts)
        pieces = []
        for head in range(self._local.num_key_heads):
            start = (self._first + head) * width
            for at, length in parts:
                pieces.append(_Piece(at + head * length, start, length))
                start += length
        return self._shape.num_key_heads * width, pieces


class DeltaWeights(WeightedLayer):
    """What is no projection: the convolution, decays, and the weight of the norm, this rank's heads."""

    def __init__(self, setup: LayerSetup, shape: DeltaShape, spec: DeltaSpec, first_head: int) -> None:
        super().__init__()
        self._shape, self._local, self._first = shape, spec, first_head

        def empty(*sizes: int) -> Tensor:
            return torch.zeros(sizes, device=setup.device)

        self.rule = DeltaParameters(
            empty(spec.num_value_heads), empty(spec.num_value_heads), empty(spec.num_channels, spec.width)
        )
        self.norm = torch.ones(spec.value_dim, dtype=setup.dtype, device=setup.device)

    def weights(self) -> Iterable[Tensor]:
        return [self.rule.log_decay, self.rule.bias, self.rule.taps, self.norm]

    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        loaders: dict[str, Callable[[LazyTensor], None]] = {
            "A_log": partial(self._load_heads, self.rule.log_decay),
            "dt_bias": partial(self._load_heads, self.rule.bias),
            "conv1d.weight": self._load_taps,
            "norm.weight": self._load_norm,
        }
        return {sibling(path, name): load for name, load in loaders.items()}

    def _load_heads(self, into: Tensor, tensor: LazyTensor) -> None:
        shape = self._shape
        expect_shape(tensor, (shape.num_value_heads,))
        first = self._first * (shape.num_value_heads // shape.num_key_heads)
        into.copy_(tensor.read(0, first, len(into)))

    def _load_taps(self, tensor: LazyTensor) -> None:
        shape, local, taps = self._shape, self._local, self.rule.taps
        expect_shape(tensor, (shape.num_channels, 1, shape.width))
        keys, first = shape.num_key_heads * shape.key_dim, self._first * shape.key_dim
        first_value = self._first * (shape.num_value_heads // shape.num_key_heads) * shape.value_dim
        at = 0
        for start, length in (
            (first, local.key_size),
            (keys + first, local.key_size),
            (2 * keys + first_value, local.value_size),
        ):
            taps[at : at + length].copy_(tensor.read(0, start, length)[:, 0])
            at += length

    def _load_norm(self, tensor: LazyTensor) -> None:
        expect_shape(tensor, tuple(self.norm.shape))
        self.norm.copy_(tensor.read())


class DeltaRule(CacheLayer):
    """From projections to normed and gated outputs, [T, H × V], over the request's state."""

    def __init__(self, setup: LayerSetup, spec: DeltaSpec, weights: DeltaWeights, eps: float) -> None:
        super().__init__(DeltaCacheSpec(spec), spec.value_size)
        self._kernel = setup.kernels.choose(DELTA, spec, setup.dtype)
        self._gated_norm = setup.kernels.choose(GATED_NORM, GatedNormSpec(spec.value_dim), setup.dtype)
        self._shape, self._weights, self._eps = spec, weights, eps
        self._number = 0
        self._state = DeltaState.zeros(spec, 0, torch.device("meta"))

    def bind(self, number: int, state: DeltaState) -> None:
        """`number`: of the builder, which owns the state."""
        self._number, self._state = number, state

    def attend(self, x: Tensor) -> Tensor:
        """As `DeltaProjection` returns it → [T, H × V]."""
        shape, rule, metadata = self._shape, self._weights.rule, current_context().metadata[self._number]
        heads = shape.num_value_heads
        qkv, gate, b, a = x.split((shape.num_channels, shape.value_size, heads, heads), -1)
        mixed = self._kernel.convolve(qkv, rule, self._state, metadata)
        out = self._kernel.update(mixed, a, b, rule, self._state, metadata)
        gate = gate.unflatten(-1, (heads, shape.value_dim))
        return self._gated_norm(out, gate, self._weights.norm, self._eps)


class GatedDeltaNet(nn.Module):
    """In place of a `SelfAttention`. Returns this rank's part of the sum over ranks."""

    def __init__(self, setup: LayerSetup, shape: DeltaShape) -> None:
        super().__init__()
        num_heads = setup.tp.share(shape.num_key_heads, "key heads of linear attention")
        spec = DeltaSpec(
            num_key_heads=num_heads,
            num_value_heads=num_heads * (shape.num_value_heads // shape.num_key_heads),
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            width=shape.width,
            dtype=setup.dtype,
            num_drafts=setup.num_drafts,
        )
        first_head = setup.tp.rank * num_heads
        self.in_proj = DeltaProjection(setup, shape, spec, first_head)
        self.weights = DeltaWeights(setup, shape, spec, first_head)
        self.rule = DeltaRule(setup, spec, self.weights, shape.norm_eps)
        self.out_proj = RowLinear(setup, shape.num_value_heads, shape.value_dim, shape.hidden_size)

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(of norm(residual + x), residual + x), of all tokens or of those `wanted`, int64 [W]; the state takes in
        all."""
        projected, residual = self.in_proj.of_norm(norm, x, residual)
        out = self.rule(projected)
        if wanted is None:
            return self.out_proj(out), residual
        return self.out_proj(out.index_select(0, wanted)), residual.index_select(0, wanted)
