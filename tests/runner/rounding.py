"""Rows in blocks of whole numbers."""

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

Type = GGMLQuantizationType
HALVES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0],
}  # fmt: skip
"""Format → where its half-precision numbers are in a block."""


def random_rows(kind: Type, num_rows: int = 6, num_values: int = 768) -> np.ndarray:
    """uint8 [rows, bytes]: any bits, but scales of a usual size."""
    rng = np.random.default_rng(0)
    values, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (num_rows, num_values // values, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.standard_normal(blocks.shape[:2]) * 0.01
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def rounded_rows(x: Tensor) -> Tensor:
    """As the kernels see them: 8 bits in blocks of 32."""
    steps = row_steps(x)
    return (torch.round(x.unflatten(1, (-1, 32)) / steps) * steps).flatten(1)


def row_steps(x: Tensor) -> Tensor:
    """[rows, blocks, 1]: what whole numbers of each block are multiplied by."""
    return x.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
