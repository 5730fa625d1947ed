"""Weights of a linear layer as a checkpoint has them, by kind. A kernel packs them once into what it reads.

O output features, I input features, of this rank's shard.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    weight: Tensor
    """float [O, I]"""
    bias: Tensor | None = None
    """float [O]"""


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """DeepSeek's form: float8_e4m3 in square blocks with a scale each."""

    weight: Tensor
    """float8_e4m3 [O, I]"""
    scales: Tensor
    """float32 [O / 128, I / 128], rounded up: what a block is multiplied by."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Int8:
    weight: Tensor
    """int8 [O, I]"""
    scales: Tensor
    """float32 [O]"""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MxFp4:
    """OCP microscaling: blocks of 32 along I share a power of two."""

    weight: Tensor
    """uint8 [O, I / 2]: two float4_e2m1 a byte, the lower half first."""
    scales: Tensor
    """uint8 [O, I / 32]: exponents, biased by 127."""
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Rows of a GGUF file, as they are."""

    weight: Tensor
    """uint8 [O, bytes of a row]"""
    quantization: str
    """GGUF's name, such as Q4_1."""
    bias: Tensor | None = None


Weight = Dense | Fp8Block | Int8 | MxFp4 | GgufRows
