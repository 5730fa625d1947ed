"""Rotary position embedding: the tables, and their rows for the positions of a step."""

import torch
from torch import Tensor

from worker.kernels.interface import KernelBackend
from worker.loader.rope import RopeConfig, rope_frequencies


def rotary_table(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """cos as (c, c) and sin as (−s, s), float32 [max_len, head_dim] each.

    Angles are products in float32, as transformers computes them, so that long positions agree with it.
    """
    frequencies = torch.tensor(rope_frequencies(rope, head_dim), dtype=torch.float32)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class RotaryEmbedding:
    """Shared by all layers of a model."""

    def __init__(self, kernels: KernelBackend, rope: RopeConfig, head_dim: int, max_len: int) -> None:
        cos, sin = rotary_table(rope, head_dim, max_len)
        self._cos = cos.to(kernels.device, kernels.dtype)
        self._sin = sin.to(kernels.device, kernels.dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) for int64 positions [T], each [T, 1, head_dim]; look up once a step."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[:, None]
