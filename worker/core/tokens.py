"""Token ids in bulk: four bytes each, copied as memory, and nothing for the garbage collector to walk through."""

from array import array
from collections.abc import Iterable

TYPECODE = "i"


def token_array(token_ids: Iterable[int] = ()) -> "array[int]":
    """A new array of these ids. An array of ids as the source is copied as memory."""
    return array(TYPECODE, token_ids)
