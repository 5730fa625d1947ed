"""What Llama, Mistral, Qwen and their like share: decoder layers of attention and a gated MLP, and a head."""

from torch import Tensor

from worker.layers.blocks import AttentionShape, DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.embedding import OutputHead
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM


class DecoderForCausalLM(CausalLM):
    """A decoder, which a family makes, and a head over it."""

    def __init__(self, config: ModelConfig, setup: LayerSetup, decoder: Decoder, soft_cap: float | None = None) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.model = decoder
        tied_to = decoder.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead(setup, config.vocab_size, config.hidden_size, tied_to, soft_cap)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model.forward(input_ids)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head.forward(hidden)

    def output_head(self) -> OutputHead:
        return self.lm_head


class DenseForCausalLM(DecoderForCausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: ModelConfig, setup: LayerSetup, *, has_qk_norm: bool = False) -> None:
        rope = rope_table(setup, config.rope, config.head_dim, config.max_model_len)
        layers = [
            DecoderLayer(
                setup,
                SelfAttention(setup, attention_shape(config, layer, has_qk_norm=has_qk_norm), rope),
                GatedMLP(setup, config.hidden_size, config.intermediate_size, config.mlp_bias),
                config.hidden_size,
                config.rms_norm_eps,
            )
            for layer in range(config.num_layers)
        ]
        decoder = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        super().__init__(config, setup, decoder)


def attention_shape(config: ModelConfig, layer: int, *, has_qk_norm: bool = False) -> AttentionShape:
    """What the configuration says of that layer's attention."""
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bias=config.attention_bias or config.qkv_bias,
        output_bias=config.attention_bias,
        qk_norm_eps=config.rms_norm_eps if has_qk_norm else None,
        rotary_dim=config.rope.rotary_dim(config.head_dim),
        window=config.window(layer),
    )
