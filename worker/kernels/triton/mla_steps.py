"""Steps that together need every kernel of latent attention that any step can need: what is compiled before the first
one. See `gqa_steps`."""

from collections.abc import Iterator

from worker.kernels.mla import MlaSpec
from worker.kernels.step import Chunk, Step
from worker.kernels.triton.gqa_splits import usual_splits
from worker.kernels.triton.gqa_steps import contexts_of, short_chunks
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.mla_tiles import head_blocks, tile_of
from worker.kernels.triton.overlap import MAX_OVERLAP_TOKENS

LONG_CHUNK = 128
"""Tokens from which it takes less time to expand a context than to attend to latents, of which each head's queries and
mixtures have three times as many numbers as of keys and values."""


def graph_contexts(spec: MlaSpec, machine: Machine, num_rows: int, max_context_len: int) -> tuple[int, ...]:
    """See `CacheBuilder.graph_contexts`."""
    return contexts_of(splits_of_rows(spec, machine, num_rows), max_context_len)


def splits_of_rows(spec: MlaSpec, machine: Machine, num_rows: int) -> int:
    tile = tile_of(spec, machine, 1)
    return usual_splits(machine, num_rows * head_blocks(spec, tile), tile.resident)


def all_steps(spec: MlaSpec, machine: Machine, max_rows: int, max_tokens: int, max_context_len: int) -> Iterator[Step]:
    """Rows alone, and with so many tokens beside them that kernels do not overlap; a long chunk; short ones."""
    kinds: dict[int, int] = {}
    for num_rows in range(1, max_rows + 1):
        kinds.setdefault(splits_of_rows(spec, machine, num_rows), num_rows)
    for num_rows in kinds.values():
        for longest in graph_contexts(spec, machine, num_rows, max_context_len):
            yield Step(num_uniform_rows=num_rows, max_context_len=longest)
            if num_rows < max_rows and num_rows + MAX_OVERLAP_TOKENS < max_tokens:
                chunk = Chunk(1 + MAX_OVERLAP_TOKENS, min(2 + MAX_OVERLAP_TOKENS, max_context_len))
                yield Step(num_uniform_rows=num_rows, chunks=(chunk,), max_context_len=longest)
    if (longest := min(LONG_CHUNK, max_tokens, max_context_len)) == LONG_CHUNK:
        yield Step(num_uniform_rows=0, chunks=(Chunk(longest, longest),), max_context_len=longest)
    yield from short_chunks(max_rows, max_tokens, max_context_len)
