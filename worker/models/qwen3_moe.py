"""Qwen3MoeForCausalLM: a Qwen3 with experts in place of most MLPs."""

from torch import Tensor

from worker.layers.blocks import AttentionShape, DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.embedding import OutputHead
from worker.layers.moe import MoeBlock
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.families.qwen3_moe import Qwen3MoeConfig
from worker.models.base import CausalLM


class Qwen3MoeForCausalLM(CausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: Qwen3MoeConfig, setup: LayerSetup) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps,
        )
        layers = [
            DecoderLayer(
                setup,
                SelfAttention(setup, shape, rope),
                GatedMLP(setup, config.hidden_size, config.intermediate_size)
                if number in config.dense_layers
                else MoeBlock(setup, config.hidden_size, config.experts),
                config.hidden_size,
                config.rms_norm_eps,
            )
            for number in range(config.num_layers)
        ]
        self.model = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead(setup, config.vocab_size, config.hidden_size, tied_to)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head(hidden)
