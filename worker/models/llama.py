"""LlamaForCausalLM: Llama 2 and 3, SmolLM2 and what shares their shape."""

from torch import Tensor, nn

from worker.kernels.interface import AttentionShape, KernelBackend
from worker.layers.attention import PagedAttention
from worker.layers.embedding import OutputHead, TokenEmbedding
from worker.layers.linear import MergedColumnLinear, RowLinear, shard_of
from worker.layers.norm import RMSNorm
from worker.layers.parallel import TensorParallel
from worker.layers.rotary import RotaryEmbedding
from worker.loader.checkpoint import WeightTarget
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> None:
        super().__init__()
        dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        self._kernels = kernels
        self._num_heads, self._num_kv_heads = (
            shard_of(heads, parallel, "q_proj")[1],
            shard_of(kv_heads, parallel, "k_proj")[1],
        )
        parts = {"q_proj": (heads, dim), "k_proj": (kv_heads, dim), "v_proj": (kv_heads, dim)}
        self.qkv_proj = MergedColumnLinear(kernels, parallel, config.hidden_size, parts, config.attention_bias)
        self.o_proj = RowLinear(kernels, parallel, heads, dim, config.hidden_size, config.attention_bias)
        shape = AttentionShape(self._num_heads, self._num_kv_heads, dim)
        self.attention = PagedAttention(kernels, shape, dim**-0.5)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return self.qkv_proj.weight_targets(prefix) | self.o_proj.weight_targets(f"{prefix}o_proj.")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys stand side by side and are rotated in one go."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (heads + 2 * kv_heads, -1))
        qk = self._kernels.rotary(qkv[:, : heads + kv_heads], cos, sin)
        return self.o_proj(self.attention(qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]))


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> None:
        super().__init__()
        self._kernels = kernels
        size = config.intermediate_size
        parts = {"gate_proj": (size, 1), "up_proj": (size, 1)}
        self.gate_up_proj = MergedColumnLinear(kernels, parallel, config.hidden_size, parts, config.mlp_bias)
        self.down_proj = RowLinear(kernels, parallel, size, 1, config.hidden_size, config.mlp_bias)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return self.gate_up_proj.weight_targets(prefix) | self.down_proj.weight_targets(f"{prefix}down_proj.")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._kernels.silu_and_mul(self.gate_up_proj(x)))


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, kernels, parallel)
        self.post_attention_layernorm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config, kernels, parallel)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return (
            self.input_layernorm.weight_targets(f"{prefix}input_layernorm.")
            | self.self_attn.weight_targets(f"{prefix}self_attn.")
            | self.post_attention_layernorm.weight_targets(f"{prefix}post_attention_layernorm.")
            | self.mlp.weight_targets(f"{prefix}mlp.")
        )

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x is what the layer before adds to the residual stream."""
        x, residual = self.input_layernorm.add_norm(x, residual)
        x, residual = self.post_attention_layernorm.add_norm(self.self_attn(x, cos, sin), residual)
        return self.mlp(x), residual


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, norm, head; `CausalLM` has the contract."""

    def __init__(self, config: ModelConfig, kernels: KernelBackend, parallel: TensorParallel) -> None:
        super().__init__()
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = TokenEmbedding(kernels, parallel, *size)
        self._layers = [LlamaLayer(config, kernels, parallel) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RMSNorm(kernels, config.hidden_size, config.rms_norm_eps)
        self._tied = config.tie_word_embeddings
        self.lm_head = OutputHead(kernels, parallel, *size, tied_to=self.embed_tokens if self._tied else None)
        self._rotary = RotaryEmbedding(kernels, config.rope, config.head_dim, config.max_model_len)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = self.embed_tokens.weight_targets("model.embed_tokens.") | self.norm.weight_targets("model.norm.")
        for i, layer in enumerate(self._layers):
            targets |= layer.weight_targets(f"model.layers.{i}.")
        return targets if self._tied else targets | self.lm_head.weight_targets("lm_head.")

    def attention_layers(self) -> list[PagedAttention]:
        return [layer.self_attn.attention for layer in self._layers]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = self._rotary.at(positions)
        residual = x.new_zeros(x.shape)
        for layer in self._layers:
            x, residual = layer(x, residual, cos, sin)
        return self.norm.add_norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
