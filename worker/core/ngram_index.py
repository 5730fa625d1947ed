"""Where the last tokens of a sequence stood before: a hash table over its n-grams, in the manner of LZ77."""

from array import array

NUM_BUCKETS = 1 << 14
MASK = NUM_BUCKETS - 1
"""Of the hash of a tuple of numbers, which is the same in every process."""
MAX_CANDIDATES = 32
"""Places that a search looks at, the latest first: what bounds its cost."""


class NgramIndex:
    """The n-grams of one sequence that some token follows. It grows with the committed tokens, 4 bytes for each.

    N-grams of one hash are chained, the latest first, and compared when they are found.
    """

    __slots__ = ("_heads", "_previous", "_size")

    def __init__(self, size: int) -> None:
        """`size`: tokens of an n-gram, at least 1."""
        self._size = size
        self._heads = array("i", bytes(4 * NUM_BUCKETS))
        """By hash: where the latest n-gram ends, which is the place of the token after it; 0: none."""
        self._previous = array("i")
        """Of each place from `size` on: the one before it in its chain."""

    @property
    def num_indexed(self) -> int:
        """Tokens so far up to which each is known to follow what is before it; the first few follow no n-gram."""
        return self._size + len(self._previous)

    def extend(self, token_ids: "array[int]", most: int) -> int:
        """Takes in the tokens it has not seen, at most `most`; returns how many."""
        size, start = self._size, self.num_indexed
        end = min(len(token_ids), start + most)
        heads, previous = self._heads, self._previous
        for place in range(start, end):
            bucket = hash(tuple(token_ids[place - size : place])) & MASK
            previous.append(heads[bucket])
            heads[bucket] = place
        return max(end - start, 0)

    def find(self, token_ids: "array[int]", longest: int) -> int:
        """The place of a token that follows what the sequence ends with: after the longest match of at most `longest`
        tokens among the candidates, of equals the latest. 0: the last n-gram was not there before."""
        size, num = self._size, len(token_ids)
        if num <= size:
            return 0
        found, found_length = 0, size - 1
        place = self._heads[hash(tuple(token_ids[-size:])) & MASK]
        for _ in range(MAX_CANDIDATES):
            if not place or found_length >= longest:
                break
            length = _match(token_ids, place, num, longest)
            if length > found_length:
                found, found_length = place, length
            place = self._previous[place - size]
        return found


def _match(token_ids: "array[int]", place: int, end: int, longest: int) -> int:
    """How many tokens before `place` equal those before `end`."""
    length = 0
    while length < longest and length < place and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
        length += 1
    return length
