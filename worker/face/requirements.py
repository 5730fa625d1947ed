"""How a worker checks what routers send. Each raises InvalidArgumentError naming the field."""

import math
from collections.abc import Iterable, Sized

from common.bounds import Range
from fissile.errors import InvalidArgumentError


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise InvalidArgumentError.of(field, f"is {value}; {wanted} is needed")


def require_in(allowed: Range, field: str, value: float) -> None:
    if value in allowed:
        return
    low, high = (f"{bound:g}".replace("-", "−") for bound in (allowed.low, allowed.high))
    if allowed.high == math.inf:
        wanted = f"{low} or more"
    else:
        wanted = f"above {low}, at most {high}" if allowed.above_low else f"{low} to {high}"
    require(False, field, value, wanted)


def require_length(least: int, most: int, field: str, values: Sized) -> None:
    wanted = f"{least} to {most}" if least else f"at most {most}"
    require(least <= len(values) <= most, field, f"{len(values)} long", wanted)


def require_at_most(most: int, field: str, size: int, words: str) -> None:
    require(size <= most, field, f"{size} {words}", f"at most {most}")


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgumentError.of(field, f"token id {largest} is not below the vocabulary size {vocab_size}")
