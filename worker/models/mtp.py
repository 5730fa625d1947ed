"""Multi-token prediction: a layer behind a model's own that guesses one token further (DeepSeek-V3, arXiv 2412.19437,
section 2.2)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.layers.blocks import DecoderLayer
from worker.layers.embedding import OutputHead, TokenEmbedding
from worker.layers.linear import RowLinear, shard_of
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import weight_targets
from worker.loader.checkpoint import WeightTarget
from worker.loader.model_part import renamed
from worker.models.state_head import StateHead


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMtp:
    """How a checkpoint has it."""

    prefix: str
    """Beginning of the names of its tensors. Those of further such layers have others: they are not used."""
    names: tuple[tuple[str, str], ...] = ()
    """Beginnings of names in `MtpLayer`, and what stands behind the prefix for each; the first that fits counts."""
    copies: tuple[str, ...] = ()
    """Beginnings of names, behind the prefix, of the model's embedding and head."""


@dataclass(frozen=True, slots=True)
class MtpKind:
    """How a family has it."""

    make: Callable[[Any, LayerSetup], MtpLayer]
    """Of the model's configuration."""
    stored: Callable[[int], StoredMtp]
    """Of a model of so many layers."""
    passes_on_normed: bool = False
    """What the layer takes from its own last pass is normed as for the head."""


def behind_the_last(num_layers: int) -> StoredMtp:
    return StoredMtp(prefix=f"model.layers.{num_layers}.", copies=("embed_tokens.", "shared_head.head."))


def as_qwen_has_it(_num_layers: int) -> StoredMtp:
    return StoredMtp(
        prefix="mtp.",
        names=(
            ("eh_proj.", "fc."),
            ("enorm.", "pre_fc_norm_embedding."),
            ("hnorm.", "pre_fc_norm_hidden."),
            ("shared_head.norm.", "norm."),
            ("mlp.shared_experts.", "layers.0.mlp.shared_expert."),
            ("", "layers.0."),
        ),
    )


def as_mimo_has_it(_num_layers: int) -> StoredMtp:
    return StoredMtp(
        prefix="model.mtp.layers.0.",
        names=(
            ("shared_head.norm.", "final_layernorm."),
            ("post_attention_layernorm.", "pre_mlp_layernorm."),
            ("self_attn.sinks", "self_attn.attention_sink_bias"),
        ),
    )


class MtpHead(StateHead):
    """Goes on from the last hidden state that the model had when it predicted a token. Embedding and head are the
    model's own."""

    needs_hidden = True

    def __init__(
        self, setup: LayerSetup, layer: MtpLayer, stored: StoredMtp, embedding: TokenEmbedding, head: OutputHead,
        vocab_size: int, hidden_size: int, max_tokens: int, *, passes_on_normed: bool,
    ) -> None:  # fmt: skip
        """`max_tokens`: of a step. `passes_on_normed`: see `MtpKind`."""
        super().__init__()
        self.vocab_size = vocab_size
        self.layer, self._stored = layer, stored
        self._passes_on_normed = passes_on_normed
        self._shared = embedding, head
        """In a tuple, or they would be filled and packed as layers of this module."""
        start, length = shard_of(2 * hidden_size, setup.tp, "input")
        self._part = slice(start, start + length)
        self.previous = torch.zeros(max_tokens, hidden_size, dtype=setup.dtype, device=setup.device)

    def weight_targets(self) -> dict[str, WeightTarget]:
        stored, targets = self._stored, weight_targets(self.layer)
        return {stored.prefix + renamed(name, stored.names): target for name, target in targets.items()}

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], complete on every rank."""
        layer, previous = self.layer, self.previous[: len(input_ids)]
        parts = self._shared[0](input_ids)
        token = layer.enorm.add_norm(parts, torch.zeros_like(parts))[0]
        both = torch.cat((token, layer.hnorm(previous)), -1)
        x, residual = layer(layer.eh_proj(both[:, self._part].contiguous()), torch.zeros_like(parts))
        normed, hidden = layer.shared_head.norm.add_norm(x, residual)
        return normed if self._passes_on_normed else hidden

    def states(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """The model's last ones, normed."""
        return hidden[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor | None:
        normed = hidden if self._passes_on_normed else self.layer.shared_head.norm(hidden)
        return self._shared[1](normed)
