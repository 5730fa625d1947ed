"""The `torch` kernel backend: the reference, and the default on a CPU. Runs unchanged on CUDA."""

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.interface import AttentionShape, AttentionStep
from worker.kernels.torch import attention
from worker.kernels.torch.attention import TorchAttentionPlan
from worker.kernels.torch.linear import PackedLinear, choose_linear
from worker.kernels.torch.random import random_uniform


class TorchBackend:
    """Implements `worker.kernels.interface.KernelBackend`; the contracts are there."""

    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._linear = choose_linear(device, dtype)

    def describe(self) -> dict[str, str]:
        return {"linear": self._linear.name, "all other operations": "torch"}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return functional.rms_norm(residual, weight.shape, weight, eps), residual

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding(ids, table)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped = torch.roll(x, x.shape[-1] // 2, -1)
        return (x * cos).addcmul_(swapped, sin)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._linear.pack(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self._linear.apply(x, packed)

    def plan_attention(self, step: AttentionStep, shape: AttentionShape) -> TorchAttentionPlan:
        return attention.plan_attention(step, shape, self.dtype)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, token_slots: Tensor) -> None:
        k_cache.flatten(0, 1).index_copy_(0, token_slots, k)
        v_cache.flatten(0, 1).index_copy_(0, token_slots, v)

    def attention_decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TorchAttentionPlan, scale: float
    ) -> Tensor:
        assert plan.decode is not None
        return attention.decode(q, k_cache, v_cache, plan.decode, scale)

    def attention_prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TorchAttentionPlan, scale: float
    ) -> Tensor:
        return attention.prefill(q, k_cache, v_cache, plan.prefill, scale)

    def copy_blocks(self, cache: Tensor, source: Tensor, destination: Tensor) -> None:
        cache.index_copy_(1, destination, cache.index_select(1, source))

    def zero_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        cache.index_fill_(1, blocks, 0)

    def swap_out(self, cache: Tensor, host: Tensor, blocks: Tensor, host_blocks: list[int]) -> None:
        gathered = cache.index_select(1, blocks).transpose(0, 1).contiguous()
        for i, host_block in enumerate(host_blocks):
            host[host_block].copy_(gathered[i], non_blocking=True)

    def swap_in(self, cache: Tensor, host: Tensor, blocks: Tensor, host_blocks: list[int]) -> None:
        staged = torch.empty((len(host_blocks), *host.shape[1:]), dtype=cache.dtype, device=cache.device)
        for i, host_block in enumerate(host_blocks):
            staged[i].copy_(host[host_block], non_blocking=True)
        cache.index_copy_(1, blocks, staged.transpose(0, 1))

    def random_uniform(self, seeds: Tensor, positions: Tensor, stream: int, num: int) -> Tensor:
        return random_uniform(seeds, positions, stream, num)
