"""EAGLE-3 (arXiv 2503.01840): one layer that drafts from what several layers of another model leave, under the names
that checkpoints of `LlamaForCausalLMEagle3` have."""

from dataclasses import replace

import torch
from torch import Tensor

from worker.attention.context import current_context
from worker.layers.blocks import DecoderLayer, GatedMLP, SelfAttention
from worker.layers.embedding import OutputHead, TokenEmbedding
from worker.layers.kept_states import KeptStates
from worker.layers.linear import RowLinear, shard_of
from worker.layers.norm import RMSNorm
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.families.eagle3 import Eagle3Config
from worker.models.deepseek import DeepseekForCausalLM
from worker.models.dense import DecoderForCausalLM, attention_shape
from worker.models.state_head import StateHead

UNLIKELY = -1e30
"""Logit of tokens that the draft does not know. It is finite, as rows with others count as broken."""


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention sees a token beside the state that it was predicted from, each normed."""

    self_attn: SelfAttention

    def __init__(self, setup: LayerSetup, config: Eagle3Config) -> None:
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        shape = replace(attention_shape(config, 0), input_size=2 * config.hidden_size)
        mlp = GatedMLP(setup, config.hidden_size, config.intermediate_size, config.mlp_bias)
        super().__init__(
            setup, SelfAttention(setup, shape, rope), mlp, config.hidden_size, config.rms_norm_eps
        )  # fmt: skip
        self.hidden_norm = RMSNorm(setup, config.hidden_size, config.rms_norm_eps, takes_parts=False)
        self._has_normed_residual = config.has_normed_residual

    def of_states(self, parts: Tensor, previous: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of embeddings, this rank's part of their sum, and states, which stay as they are, [T, hidden] each: as
        `forward`."""
        token = self.input_layernorm.add_norm(parts, torch.zeros_like(parts))[0]
        state = self.hidden_norm(previous)
        residual = (state if self._has_normed_residual else previous).clone()
        qkv = self.self_attn.qkv_proj(torch.cat((token, state), -1))
        x, residual = self.self_attn.mix(qkv, residual, wanted)
        return self.mlp(self.post_attention_layernorm, x, residual)


class Eagle3Head(StateHead):
    """Proposes tokens of a smaller vocabulary, which are some of the model's. Embedding and head are the model's where
    the checkpoint has none."""

    def __init__(
        self, config: Eagle3Config, setup: LayerSetup, model: DecoderForCausalLM | DeepseekForCausalLM, kept: KeptStates
    ) -> None:
        """`kept`: the states that `model` keeps."""
        super().__init__()
        self.vocab_size, hidden_size = config.vocab_size, config.hidden_size
        width = kept.states.shape[1]
        # In numbers of the dtype: kernels for others are made ready by passes, of which this product is no part.
        self.fc = RowLinear(replace(setup, quantization="none"), width, 1, hidden_size)
        self.midlayer = Eagle3Layer(setup, config)
        self.norm = RMSNorm(setup, hidden_size, config.rms_norm_eps)
        if config.has_embedding:
            self.embed_tokens = TokenEmbedding(setup, config.vocab_size, hidden_size)
        if config.has_head:
            self.lm_head = OutputHead(setup, config.draft_vocab_size, hidden_size)
        self._shared = (
            self.embed_tokens if config.has_embedding else model.model.embed_tokens,
            self.lm_head if config.has_head else model.lm_head,
        )
        """In a tuple, or those of the model would be filled and packed as layers of this module."""
        start, length = shard_of(width, setup.tp, "input")
        self._tp, self._part = setup.tp, slice(start, start + length)
        self._kept = kept.states
        self.needs_hidden = kept.has_last
        self.previous = torch.zeros(1, len(kept.states), hidden_size, dtype=setup.dtype, device=setup.device)
        self.token_ids: Tensor | None = None
        """int64 [draft vocabulary]: which token of the model each is; None: they are the same."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] → [T, hidden], or [W, hidden] of the tokens that are wanted, not normed; complete on every rank."""
        previous, wanted = self.previous[0, : len(input_ids)], current_context().wanted
        x, residual = self.midlayer.of_states(self._shared[0](input_ids), previous, wanted)
        return self.norm.add_norm(x, residual)[1]

    def states(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """A product of the kept ones."""
        part = self.fc(self._kept[:num_tokens, self._part].contiguous())
        return self._tp.all_reduce(part).clone()  # where it is, further sums will be

    def logits(self, hidden: Tensor) -> Tensor | None:
        found = self._shared[1](self.norm(hidden))
        if found is None or self.token_ids is None:
            return found
        lowest = max(UNLIKELY, torch.finfo(found.dtype).min)
        return found.new_full((len(found), self.vocab_size), lowest).index_copy_(1, self.token_ids, found)
