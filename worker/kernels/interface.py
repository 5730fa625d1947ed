"""The operations that models and the runner are written in. One contract for every backend.

Conventions: T tokens of a step, H query heads, K key/value heads (H a multiple of K), D head_dim, V vocabulary.
Activations are contiguous in their last dimension and in the model's dtype (float32 or bfloat16) unless said.
A cache tensor of one layer is [blocks, block_size, K, D]; a **token slot** is block × block_size + offset in the block.
Unless an operation says that it works in place, it returns a new tensor that the caller owns.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

PackedWeight = Any
"""What `pack_linear` made of a weight. Only the backend that made it can read it."""

AttentionPlan = Any
"""What `plan_attention` made of a step. Valid for that step, on the backend that made it."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The shape of one step, rows with one query token ("decode") first.

    The host lists spare every backend a device read-back.
    """

    query_lens: list[int]
    """Tokens of each row in this step; the first `num_decode_rows` are 1."""
    context_lens: list[int]
    """Tokens of each row that are in the cache once this step's K and V are written (`query_lens` included)."""
    num_decode_rows: int
    block_tables: Tensor
    """int64 [rows, most blocks of a row] on the device. Entries past a row's context are undefined but valid blocks."""
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of this rank's attention, the same in all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class KernelBackend(Protocol):
    """See the module's conventions. No operation reads a device value on the host."""

    name: str
    device: torch.device
    dtype: torch.dtype

    def describe(self) -> dict[str, str]:
        """Operation → what carries it out, for the start-up log."""

    # --- norms, activations, embedding

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x², last) + eps) × weight; x [..., N], weight [N]. The mean is taken in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual += x **in place**; returns (rms_norm(residual), residual)."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2N] holds gate and up side by side: silu(gate) × up, [T, N]. May overwrite x."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """table[ids]; ids int64 [T], table [V, N]."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding, neox pairing (i with i + D/2).

        x [T, heads, D]; cos [T, 1, D] is (c, c) and sin [T, 1, D] is (−s, s), both in x's dtype, as `rotary_table` of
        `worker.layers.rotary` lays them out.
        """

    # --- linear

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedWeight:
        """Bring weight [out, in] and bias [out] into the layout that `linear` reads; the caller drops its copies."""

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """x @ weightᵀ + bias; x [T, in] → [T, out]."""

    # --- paged attention

    def plan_attention(self, step: AttentionStep, shape: AttentionShape) -> AttentionPlan:
        """Work out, once a step, what all layers share (indices, masks)."""

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, token_slots: Tensor) -> None:
        """cache[token_slots[t]] = k[t], v[t]; k, v [T, K, D], token_slots int64 [T], all different. In place."""

    def attention_decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        """Attention of the plan's decode rows over all their context; q [decode rows, H, D] → the same shape.

        Reads no cache entry outside a row's context: what is there may be NaN.
        """

    def attention_prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        """Causal attention of the rows after the decode rows, each over its cached prefix and itself.

        q [their tokens, H, D], rows one after another → the same shape. A row's query i (of n) sees the first
        context − n + i + 1 tokens of its context, read from the cache (this step's are already written).
        """

    # --- block copies; caches are [layers, blocks, block_size, K, D], host tensors [blocks, layers, block_size, K, D]
    #     so that a host block is one piece of (pinned) memory

    def copy_blocks(self, cache: Tensor, source: Tensor, destination: Tensor) -> None:
        """cache[:, destination] = cache[:, source], all reads before all writes. In place; int64 device indices."""

    def zero_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        """cache[:, blocks] = 0. In place; int64 device indices."""

    def swap_out(self, cache: Tensor, host: Tensor, blocks: Tensor, host_blocks: list[int]) -> None:
        """host[host_blocks[i]] = cache[:, blocks[i]]; `blocks` int64 on the device.

        Ordered after the device work submitted before; the host tensor is ready once the device got there.
        """

    def swap_in(self, cache: Tensor, host: Tensor, blocks: Tensor, host_blocks: list[int]) -> None:
        """cache[:, blocks[i]] = host[host_blocks[i]], ordered after earlier `swap_out`s."""

    # --- sampling

    def random_uniform(self, seeds: Tensor, positions: Tensor, stream: int, num: int) -> Tensor:
        """float64 [R, num] in (0, 1): element (r, i) is a function of (seeds[r], positions[r], stream, i) alone.

        seeds int64 [R] (the bits of an unsigned number), positions int64 [R].
        """
