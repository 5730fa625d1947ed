"""Drafts without a model: what followed the last tokens where they stood before, in the prompt or the answer.

Known as prompt look-up. It pays where an answer repeats what is there: quotations, edits of a text, code, tables.
"""

from collections.abc import Sequence as Seq

from worker.core.ngram_index import NgramIndex
from worker.core.sequence import Sequence

MAX_INDEXED = 8192
"""Tokens that are taken in while a step is planned, some milliseconds: a longer prompt takes several steps."""


class NgramDrafter:
    """See `Drafter`. What it knows of a sequence stays with the sequence."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """A place counts if at least `min_tokens` before it are the last ones, and up to `max_tokens` the more the
        better. 1 ≤ `min_tokens` ≤ `max_tokens`."""
        self._min, self._max = min_tokens, max_tokens
        self._num_left = MAX_INDEXED

    def begin_step(self) -> None:
        self._num_left = MAX_INDEXED

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        token_ids = seq.token_ids
        index = seq.ngrams
        if index is None:
            index = seq.ngrams = NgramIndex(self._min)
        self._num_left -= index.extend(token_ids, self._num_left)
        if index.num_indexed < len(token_ids):
            return ()
        place = index.find(token_ids, self._max)
        if not place:
            return ()
        drafts = token_ids[place : place + most]
        # Where the place is near the end, what repeats is that short, and is taken to repeat again.
        distance = len(token_ids) - place
        while len(drafts) < most:
            drafts.append(drafts[-distance])
        return drafts
