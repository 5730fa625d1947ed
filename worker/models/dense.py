"""What Llama, Mistral, Qwen3 and their like share: decoder layers of attention and a gated MLP, and a head."""

from torch import Tensor

from worker.layers.blocks import AttentionShape, DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.embedding import OutputHead
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM


class DenseForCausalLM(CausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: ModelConfig, setup: LayerSetup, *, has_qk_norm: bool = False) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        shape = AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps if has_qk_norm else None,
        )
        layers = [
            DecoderLayer(
                setup,
                SelfAttention(setup, shape, rope),
                GatedMLP(setup, config.hidden_size, config.intermediate_size, config.mlp_bias),
                config.hidden_size,
                config.rms_norm_eps,
            )
            for _ in range(config.num_layers)
        ]
        self.model = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead(setup, config.vocab_size, config.hidden_size, tied_to)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head(hidden)
