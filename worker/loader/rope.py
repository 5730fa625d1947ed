"""Rotary position embedding: its configuration and its frequencies. No torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0
"""Where nothing else is said."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): what turns less than `beta_slow` times over the original context is stretched, what
    turns more than `beta_fast` times stays."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool = True
    """Whether the two bounds are widened to whole dimensions."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """At most one of `linear_factor`, `llama3` and `yarn` scales, and `turning_share` goes with the first alone."""

    theta: float
    linear_factor: float = 1.0
    """All positions are divided by this."""
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    frequency_divisors: tuple[float, ...] = ()
    """Before any scaling: GGUF's form of Llama 3's, worked out. head_dim / 2 values, or empty."""
    attention_factor: float = 1.0
    """Cosine and sine are multiplied by this."""
    rotary_factor: float = 1.0
    """The share of a head, its first dimensions, that is rotated."""
    turning_share: float = 1.0
    """The share of the frequencies, the highest, that are not 0."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated, as `transformers` rounds them."""
        return int(head_dim * self.rotary_factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_frequencies(rope: RopeConfig, head_dim: int) -> list[float]:
    """The head_dim / 2 angular frequencies, in radians a position, after scaling."""
    num_turning = int(rope.turning_share * head_dim // 2)
    plain = [rope.theta ** (-2 * i / head_dim) if i < num_turning else 0.0 for i in range(head_dim // 2)]
    if rope.frequency_divisors:
        plain = [frequency / divisor for frequency, divisor in zip(plain, rope.frequency_divisors, strict=True)]
    if rope.llama3 is not None:
        return _llama3(plain, rope.llama3)
    if rope.yarn is not None:
        return _yarn(plain, rope.yarn, rope.theta, head_dim)
    return [frequency / rope.linear_factor for frequency in plain]


def _llama3(plain: list[float], scaling: Llama3Scaling) -> list[float]:
    """Wavelengths shorter than original / high_freq_factor stay, longer than original / low_freq_factor are stretched
    by `factor`, those between are interpolated (Llama 3.1's reference code)."""
    stretched = []
    for frequency in plain:
        turns = scaling.original_max_position * frequency / (2 * math.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        stretched.append(_stretched(frequency, scaling.factor, min(max(smooth, 0.0), 1.0)))
    return stretched


def _yarn(plain: list[float], scaling: YarnScaling, theta: float, head_dim: int) -> list[float]:
    """Between two dimensions, which `beta_fast` and `beta_slow` tell, the share that is kept falls from 1 to 0."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    shares = [1 - min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
    return [_stretched(frequency, scaling.factor, kept) for frequency, kept in zip(plain, shares, strict=True)]


def _stretched(frequency: float, factor: float, kept: float) -> float:
    return frequency * (kept + (1 - kept) / factor)
