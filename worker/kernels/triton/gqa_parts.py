"""Which rows of a step are attended to together, and by what: prompts' beginnings by cuDNN, all others paged."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from worker.kernels.step import Chunk, Step

DENSE_PIECE = 1024
"""Tokens, or a multiple of them, of a prompt's beginning that go to cuDNN, which prepares itself for each length anew.
What is left over follows as a chunk with a prefix."""
MAX_TOGETHER = 8
"""Prompts of one length that go there at once: for each number of them it prepares itself anew, too."""


@dataclass(frozen=True, slots=True)
class Dense:
    """The first tokens of prompts, which see nothing but themselves; of one length, and next to each other."""

    start: int
    """In the step."""
    length: int
    num_rows: int = 1

    @property
    def num_tokens(self) -> int:
        return self.length * self.num_rows

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows whose context is read from the cache."""

    start: int
    """Their first token in the step; of a single row's, where some are computed elsewhere, the first of the others."""
    num_tokens: int
    first_row: int
    num_rows: int
    longest: int
    """The longest context."""
    skipped: int = 0
    """Tokens at the beginning of a row that are computed elsewhere."""


def parts_of(step: Step, *, has_dense: bool) -> Iterator[Dense | Paged]:
    """Of a step's chunks, in their order, in as few launches as can be."""
    return _together(_one_by_one(step, has_dense=has_dense))


def _one_by_one(step: Step, *, has_dense: bool) -> Iterator[Dense | Paged]:
    """Each beginning alone."""
    together: list[Chunk] = []
    token = step.num_uniform_tokens
    for row, chunk in enumerate(step.chunks, step.num_uniform_rows):
        num_dense = chunk.num_tokens // DENSE_PIECE * DENSE_PIECE
        if has_dense and num_dense and chunk.num_tokens == chunk.context_len:
            yield from _paged(together, token, row)
            yield Dense(token, num_dense)
            if num_left := chunk.num_tokens - num_dense:
                yield Paged(token + num_dense, num_left, row, 1, chunk.context_len, num_dense)
            together = []
        else:
            together.append(chunk)
        token += chunk.num_tokens
    yield from _paged(together, token, step.num_rows)


def _together(parts: Iterable[Dense | Paged]) -> Iterator[Dense | Paged]:
    """Beginnings of one length, next to each other, as one part: 2, 4 or `MAX_TOGETHER` of them."""
    waiting: list[Dense] = []
    for part in parts:
        if waiting and (
            not isinstance(part, Dense)
            or (part.start, part.length) != (waiting[-1].end, waiting[-1].length)
            or len(waiting) == MAX_TOGETHER
        ):
            yield from _powers(waiting)
            waiting = []
        if isinstance(part, Dense):
            waiting.append(part)
        else:
            yield part
    yield from _powers(waiting)


def _powers(alike: list[Dense]) -> Iterator[Dense]:
    while alike:
        num_rows = 1 << (len(alike).bit_length() - 1)
        yield Dense(alike[0].start, alike[0].length, num_rows)
        alike = alike[num_rows:]


def _paged(chunks: list[Chunk], end: int, end_row: int) -> Iterator[Paged]:
    """The part of these chunks, if there are any, that come before token `end` and row `end_row`."""
    if chunks:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        longest = max(chunk.context_len for chunk in chunks)
        yield Paged(end - num_tokens, num_tokens, end_row - len(chunks), len(chunks), longest)
