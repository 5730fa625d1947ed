"""Rotary position embedding: the table of angles."""

import torch

from worker.kernels.elementwise import RopeTable
from worker.layers.setup import LayerSetup
from worker.loader.rope import RopeConfig, rope_frequencies


def rope_table(setup: LayerSetup, rope: RopeConfig, head_dim: int, max_len: int) -> RopeTable:
    """Of all positions below `max_len` and the dimensions that are rotated; shared by layers.

    Angles are products in float32, as transformers computes them, so that long positions agree with it.
    """
    frequencies = torch.tensor(rope_frequencies(rope, rope.rotary_dim(head_dim)), dtype=torch.float32)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RopeTable(
        torch.cat((cos, cos), -1).to(setup.device, setup.dtype),
        torch.cat((-sin, sin), -1).to(setup.device, setup.dtype),
    )
