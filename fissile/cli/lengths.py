"""How long prompts and answers of a benchmark are: a number, or a distribution to draw from."""

import math
import random
from dataclasses import dataclass

MAX_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """`text` is `N` (always N), `LOW-HIGH` (uniform, both included) or `MEAN~DEVIATION` (normal, at least 1)."""

    text: str
    low: int
    high: int
    deviation: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError, with a text for people."""
        for separator in "-~":
            first, found, second = text.partition(separator)
            if found:
                break
        try:
            low, other = int(first), float(second or first)
        except ValueError:
            raise ValueError(f"{text!r} is not N, LOW-HIGH or MEAN~DEVIATION") from None
        if low < 1 or other < 0 or (found != "~" and other < low):
            raise ValueError(f"{text!r}: lengths are at least 1, and the first is not above the second")
        if max(low, other) > MAX_LENGTH or math.isnan(other):
            raise ValueError(f"{text!r}: lengths and deviations are at most {MAX_LENGTH}")
        if found == "~":
            return cls(text, low, low, other)
        return cls(text, low, int(other))

    def draw(self, rng: random.Random) -> int:
        if self.deviation:
            return max(1, round(rng.gauss(self.low, self.deviation)))
        return rng.randint(self.low, self.high)
