"""DeepseekV3ForCausalLM and DeepseekV32ForCausalLM: latent attention, dense layers first, then experts beside shared
ones. Kimi-K2 and Moonlight are such models, too."""

from torch import Tensor, nn

from worker.kernels.elementwise import RopeTable
from worker.layers.blocks import DecoderLayer
from worker.layers.decoder import Decoder
from worker.layers.embedding import OutputHead
from worker.layers.mla import IndexShape, LatentSelfAttention, MlaShape
from worker.layers.rope import rope_table
from worker.layers.setup import LayerSetup
from worker.loader.families.deepseek import DeepseekConfig
from worker.models.base import CausalLM
from worker.models.moe import moe_or_mlp
from worker.models.mtp import MtpLayer


class DeepseekForCausalLM(CausalLM):
    """`CausalLM` has the contract."""

    def __init__(self, config: DeepseekConfig, setup: LayerSetup) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        rope = _rope(config, setup)
        layers = [
            DecoderLayer(setup, *_layer_parts(config, setup, rope, number), config.hidden_size, config.rms_norm_eps)
            for number in range(config.num_layers)
        ]
        self.model = Decoder(setup, config.vocab_size, config.hidden_size, layers, config.rms_norm_eps)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead(setup, config.vocab_size, config.hidden_size, tied_to)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model.forward(input_ids)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head.forward(hidden)

    def output_head(self) -> OutputHead:
        return self.lm_head


def deepseek_mtp_layer(config: DeepseekConfig, setup: LayerSetup) -> MtpLayer:
    """That behind the model's last one."""
    attention, mlp = _layer_parts(config, setup, _rope(config, setup), config.num_layers)
    return MtpLayer(setup, attention, mlp, config.hidden_size, config.rms_norm_eps)


def _layer_parts(
    config: DeepseekConfig, setup: LayerSetup, rope: RopeTable, number: int
) -> tuple[LatentSelfAttention, nn.Module]:
    return LatentSelfAttention(setup, _attention_shape(config), rope), moe_or_mlp(config, setup, number)


def _rope(config: DeepseekConfig, setup: LayerSetup) -> RopeTable:
    return rope_table(setup, config.rope, config.head_dim, config.max_model_len)


def _attention_shape(config: DeepseekConfig) -> MlaShape:
    index = config.index
    return MlaShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        latent_dim=config.kv_lora_rank,
        rope_dim=config.head_dim,
        nope_dim=config.nope_head_dim,
        v_head_dim=config.v_head_dim,
        scale=config.attention_scale,
        is_interleaved=config.is_interleaved,
        bias=config.attention_bias,
        index=None
        if index is None
        else IndexShape(num_heads=index.num_heads, head_dim=index.head_dim, top_k=index.top_k),
    )
