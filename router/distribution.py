"""How values are spread, in little memory: counts by buckets whose borders grow by 2 %, so that a quantile is within
1 % of an observed value however many there were (as in DDSketch, VLDB 2019)."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf, log

RELATIVE_ERROR = 0.01
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_E_FOLD = 1 / log(_GAMMA)
_LEAST = 1e-6
"""What is smaller counts as this, so there are 1,400 buckets at most for microseconds to days."""


@dataclass(slots=True)
class Distribution:
    """Of values that are added one by one."""

    counts: dict[int, int] = field(default_factory=dict)
    """By bucket; bucket i ends at _GAMMA ** i."""
    sum: float = 0.0
    min: float = inf
    max: float = 0.0

    def add(self, value: float) -> None:
        bucket = ceil(log(value) * _PER_E_FOLD) if value > _LEAST else _LEAST_BUCKET
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.sum += value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value

    def merge(self, other: "Packed") -> None:
        add_counts(self.counts, other)
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    def packed(self) -> "Packed":
        return Packed(array("h", self.counts.keys()), array("I", self.counts.values()), self.sum, self.min, self.max)


@dataclass(frozen=True, slots=True)
class Packed:
    """A distribution that is complete, in a tenth of the memory."""

    buckets: "array[int]"
    counts: "array[int]"
    sum: float
    min: float
    max: float


def add_counts(counts: dict[int, int], other: Packed) -> None:
    for bucket, count in zip(other.buckets, other.counts, strict=True):
        counts[bucket] = counts.get(bucket, 0) + count


def subtract_counts(counts: dict[int, int], other: Packed) -> None:
    """`other` must have been added before."""
    for bucket, count in zip(other.buckets, other.counts, strict=True):
        left = counts[bucket] - count
        if left:
            counts[bucket] = left
        else:
            del counts[bucket]


def quantiles(counts: dict[int, int], percents: Iterable[int]) -> list[float]:
    """For percents in order, by nearest rank. There must be values."""
    num_values = sum(counts.values())
    ordered = iter(sorted(counts.items()))
    bucket, reached = next(ordered)
    result = []
    for percent in percents:
        rank = max(1, -(-num_values * percent // 100))
        while reached < rank:
            bucket, count = next(ordered)
            reached += count
        result.append(_middle(bucket))
    return result


def _middle(bucket: int) -> float:
    """Within RELATIVE_ERROR of all that the bucket holds."""
    upper: float = _GAMMA**bucket
    return 2 * upper / (1 + _GAMMA)


_LEAST_BUCKET = ceil(log(_LEAST) * _PER_E_FOLD)
