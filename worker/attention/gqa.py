"""Attention builder for MHA and GQA: the cache tensors, their binding, and the metadata of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.core.pools import PoolKind, PoolSpec
from worker.kernels.interface import AttentionPlan, AttentionShape, AttentionStep, KernelBackend
from worker.layers.attention import PagedAttention


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of all layers, [layers, blocks, block_size, kv_heads, head_dim] each; in host memory, blocks first."""

    k: Tensor
    v: Tensor


class GQABuilder:
    """Full attention in every layer, one shape for all of them."""

    def __init__(self, kernels: KernelBackend, layers: list[PagedAttention], block_size: int) -> None:
        self._kernels, self._layers, self._block_size = kernels, layers, block_size
        self._shape: AttentionShape = layers[0].shape

    def pool_specs(self) -> list[PoolSpec]:
        """The one pool: blocks of this rank, all layers, K and V."""
        element = torch.empty(0, dtype=self._kernels.dtype).element_size()
        values = len(self._layers) * self._block_size * self._shape.num_kv_heads * self._shape.head_dim
        return [PoolSpec(PoolKind.PAGE, 2 * values * element, extra={"tokens_per_entry": self._block_size})]

    def allocate(self, num_blocks: int) -> KVCache:
        """A cache on the device. Its memory is not cleared, and on a CPU not even touched: no kernel reads an entry
        that was not written."""
        shape = (len(self._layers), num_blocks, *self._block_shape())
        dtype, device = self._kernels.dtype, self._kernels.device
        return KVCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))

    def allocate_host(self, num_blocks: int) -> KVCache:
        """Room for swapped blocks, [blocks, layers, …]; pinned when the device is a GPU."""
        shape = (num_blocks, len(self._layers), *self._block_shape())
        dtype, pinned = self._kernels.dtype, self._kernels.device.type == "cuda"
        return KVCache(*(torch.empty(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)))

    def _block_shape(self) -> tuple[int, int, int]:
        return self._block_size, self._shape.num_kv_heads, self._shape.head_dim

    def bind(self, cache: KVCache) -> None:
        """Give each layer its part of `cache`; in place of what was bound before."""
        for i, layer in enumerate(self._layers):
            layer.bind(cache.k[i], cache.v[i])

    def plan(
        self, query_lens: list[int], context_lens: list[int], num_decode_rows: int, block_tables: Tensor
    ) -> AttentionPlan:
        """What the attention layers of one step share; arguments as in `AttentionStep`."""
        step = AttentionStep(query_lens, context_lens, num_decode_rows, block_tables, self._block_size)
        return self._kernels.plan_attention(step, self._shape)
