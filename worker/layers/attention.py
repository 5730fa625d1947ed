"""The attention layer: writes K and V to the paged cache, then attends to what the forward context says."""

import torch
from torch import Tensor, nn

from worker.kernels.interface import AttentionShape, KernelBackend
from worker.runner.forward_context import current_context


class PagedAttention(nn.Module):
    """Causal attention over the paged cache. The attention builder binds the cache tensors of this layer."""

    def __init__(self, kernels: KernelBackend, shape: AttentionShape, scale: float) -> None:
        super().__init__()
        self.shape = shape
        self._kernels, self._scale = kernels, scale
        self._k_cache = self._v_cache = torch.empty(0)

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """[blocks, block_size, kv_heads, head_dim] each; owned by the builder."""
        self._k_cache, self._v_cache = k_cache, v_cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D]; k, v [T, K, D], rotated already → [T, H × D]."""
        context, kernels = current_context(), self._kernels
        kernels.write_kv(k, v, self._k_cache, self._v_cache, context.token_slots)
        split, parts = context.num_decode_tokens, []
        if split:
            parts.append(
                kernels.attention_decode(q[:split], self._k_cache, self._v_cache, context.attention, self._scale)
            )
        if split < len(q):
            parts.append(
                kernels.attention_prefill(q[split:], self._k_cache, self._v_cache, context.attention, self._scale)
            )
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed.flatten(1)
