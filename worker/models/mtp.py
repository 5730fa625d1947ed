"""Multi-token prediction: a layer behind a model's own that guesses one token further (DeepSeek-V3, arXiv 2412.19437,
section 2.2), or some of them, each of which guesses a token further than the one before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention.context import current_context
from worker.layers.blocks import DecoderLayer
from worker.layers.embedding import OutputHead, TokenEmbedding
from worker.layers.linear import RowLinear, shard_of
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import weight_targets
from worker.loader.checkpoint import WeightTarget
from worker.loader.model_part import renamed
from worker.models.state_head import StateHead
from worker.models.stored_mtp import StoredMtp


class SharedHead(nn.Module):
    def __init__(self, setup: LayerSetup, hidden_size: int, eps: float, *, has_offset_norms: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norms)


class MtpLayer(DecoderLayer):
    """A decoder layer, what makes its input of a token and a hidden state, and the norm before the head; under the
    names that checkpoints of DeepSeek-V3 have for them."""

    def __init__(
        self, setup: LayerSetup, attention: nn.Module, mlp: nn.Module, hidden_size: int, eps: float, *,
        has_offset_norms: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(setup, attention, mlp, hidden_size, eps, has_offset_norms=has_offset_norms)
        self.enorm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norms)
        self.hnorm = RMSNorm(setup, hidden_size, eps, is_offset=has_offset_norms, takes_parts=False)
        self.eh_proj = RowLinear(setup, 2 * hidden_size, 1, hidden_size)
        self.shared_head = SharedHead(setup, hidden_size, eps, has_offset_norms=has_offset_norms)


@dataclass(frozen=True, slots=True)
class MtpKind:
    """How a family has it."""

    make: Callable[[Any, LayerSetup], MtpLayer]
    """Of the model's configuration."""
    stored: Callable[[int], StoredMtp]
    """Of a model of so many layers."""
    passes_on_normed: bool = False
    """What the layer takes from its own last pass is normed as for the head."""


class MtpHead(StateHead):
    """Goes on from the last hidden state that the model had when it predicted a token. Embedding and head are the
    model's own."""

    needs_hidden = True

    def __init__(
        self, setup: LayerSetup, layers: Sequence[MtpLayer], stored: StoredMtp, embedding: TokenEmbedding,
        head: OutputHead, vocab_size: int, hidden_size: int, max_tokens: int, *, passes_on_normed: bool,
    ) -> None:  # fmt: skip
        """`max_tokens`: of a step. `passes_on_normed`: see `MtpKind`."""
        super().__init__()
        self.vocab_size = vocab_size
        self.layers, self._stored = nn.ModuleList(layers), stored
        self._passes_on_normed = passes_on_normed
        self._shared = embedding, head
        """In a tuple, or they would be filled and packed as layers of this module."""
        start, length = shard_of(2 * hidden_size, setup.tp, "input")
        self._part = slice(start, start + length)
        self.previous = torch.zeros(len(layers), max_tokens, hidden_size, dtype=setup.dtype, device=setup.device)
        self._any_token = torch.zeros(1, dtype=torch.int64, device=setup.device)

    def weight_targets(self) -> dict[str, WeightTarget]:
        prefixes, names = self._stored.prefixes(len(self.layers)), self._stored.names
        return {
            prefix + renamed(name, names): target
            for prefix, layer in zip(prefixes, self.layers, strict=True)
            for name, target in weight_targets(layer).items()
        }

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], or [W, hidden] of the tokens that are wanted; complete on every rank."""
        for later in range(self.turn + 1, len(self.layers)):
            self._run(later, input_ids, self._any_token)  # for its keys and values
        normed, hidden = self._run(self.turn, input_ids, current_context().wanted)
        return normed if self._passes_on_normed else hidden

    def _layer(self, number: int) -> MtpLayer:
        layer = self.layers[number]
        assert isinstance(layer, MtpLayer)
        return layer

    def _run(self, number: int, input_ids: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of a layer: its last hidden state, normed for the head and not."""
        layer, previous = self._layer(number), self.previous[number, : len(input_ids)]
        parts = self._shared[0](input_ids)
        token = layer.enorm.add_norm(parts, torch.zeros_like(parts))[0]
        both = torch.cat((token, layer.hnorm(previous)), -1)
        x, residual = layer(layer.eh_proj(both[:, self._part].contiguous()), torch.zeros_like(parts), wanted)
        return layer.shared_head.norm.add_norm(x, residual)

    def states(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """The model's last ones, normed."""
        return hidden[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """By the norm of the layer whose turn it is."""
        normed = hidden if self._passes_on_normed else self._layer(self.turn).shared_head.norm(hidden)
        return self._shared[1](normed)
