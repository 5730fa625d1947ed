"""What the kernels of sampling share: random bits, a row's logits, and the search for a threshold.

A threshold is searched for among distances: (best − logit) / temperature, at least 0. As bits of a float32 they order
as integers do. Masses are exp(−distance) in fixed point, so that sums are exact: they do not depend on an order, and a
row's result does not depend on who adds up what.
"""

import triton
import triton.language as tl

from worker.kernels.sampling import CHUNK, GREEDY_TEMPERATURE

ONE = 2.0**40
"""The mass of the most likely token. Rows of up to 2²² tokens fit into 63 bits."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
"""Constants of SplitMix64, as in `worker.kernels.torch.random`."""
_ONE = tl.constexpr(ONE)
_CHUNK = tl.constexpr(CHUNK)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
DIGIT_BITS = 2
"""Of a distance, found in one pass over a row's candidates."""
_DIGIT_BITS = tl.constexpr(DIGIT_BITS)
_NUM_DIGITS = tl.constexpr(32 // DIGIT_BITS)
_LIMITS = tl.constexpr(1 << DIGIT_BITS)


@triton.jit
def mix(x):
    """The finaliser of SplitMix64; uint64."""
    x = (x ^ (x >> 30)) * tl.full([], _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def random_uniform(seed, position, stream: tl.constexpr, index):
    """The float64 numbers of `worker.kernels.torch.random.random_uniform`, bit for bit."""
    golden = tl.full([], _GOLDEN, tl.uint64)
    key = mix(mix(seed.to(tl.uint64)) + position.to(tl.uint64) * golden)
    for _ in tl.static_range(stream + 1):
        key += tl.full([], _MIX_2, tl.uint64)
    bits = mix(mix(key) + (index + 1).to(tl.uint64) * golden)
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def load_logits(row, token, is_there):
    """float32 logits of a row; NaN becomes +inf, which fails the row, and what is not there −inf."""
    x = tl.load(row + token, mask=is_there, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def is_drawn(temperature):
    return temperature >= _GREEDY


@triton.jit
def distance_of(x, best, temperature):
    """Correctly rounded, as torch's own division: ties stay ties."""
    return tl.div_rn(best - x, temperature + tl.zeros_like(x))


@triton.jit
def bits_of(distance):
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def mass_of(distance):
    """int64, in fixed point."""
    return (tl.exp(-distance) * _ONE).to(tl.int64)


@triton.jit
def measure(
    source, num, best, temperature, limit,
    IS_LOGITS: tl.constexpr, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr, LIMITS: tl.constexpr,
):  # fmt: skip
    """int64 [LIMITS]: how many tokens lie within each limit, or which mass; `limit` int64 [LIMITS], bits of distances.

    `source`: `num` distances, or with IS_LOGITS a row of logits.
    """
    reached = tl.zeros([LIMITS, BLOCK], tl.int64)
    for start in range(0, num, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_there = place < num
        if IS_LOGITS:
            distance = distance_of(load_logits(source, place, is_there), best, temperature)
        else:
            distance = tl.load(source + place, mask=is_there, other=float("inf"))
        if IS_COUNT:
            weight = tl.full([BLOCK], 1, tl.int64)
        else:
            weight = mass_of(distance)
        within = (bits_of(distance)[None, :] <= limit[:, None]) & is_there[None, :]
        reached += tl.where(within, weight[None, :], 0)
    return tl.sum(reached, 1)


@triton.jit
def find_limit(
    source, num, best, temperature, goal, before, bound,
    IS_LOGITS: tl.constexpr, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of the least distance, at most `bound` int64, within which lie `goal` tokens, or a mass of `goal` float64.

    `source` as in `measure`, without the nearest: int64 `before` is what those have. A digit of the bits is found with
    each pass.
    """
    digit = tl.arange(0, _LIMITS).to(tl.int64)
    found = tl.zeros([], tl.int64)
    for level in range(_NUM_DIGITS):
        shift = 32 - _DIGIT_BITS * (level + 1)
        limit = tl.minimum(found + ((digit + 1) << shift) - 1, bound)
        reached = measure(source, num, best, temperature, limit, IS_LOGITS, IS_COUNT, BLOCK, _LIMITS)
        is_short = ((before + reached).to(tl.float64) < goal) & (digit < _LIMITS - 1)
        found += tl.sum(is_short.to(tl.int64), 0) << shift
    return tl.minimum(found, bound)
