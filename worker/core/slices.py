"""Long walks in short slices, so that who walks can stop between two of them."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

SLICE = 1024
"""Items of one slice: well below a millisecond of simple checks."""


def in_slices(items: Iterable[T]) -> Iterator[list[T]]:
    """All of `items`, in lists of at most `SLICE`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, SLICE)):
        yield chunk


def exhaust(slices: Iterable[None]) -> None:
    """The whole walk at once."""
    for _ in slices:
        pass
