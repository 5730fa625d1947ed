"""Steps that together need every kernel of attention that any step can need: what is compiled before the first one.

A kernel depends on little of a step: on how many splits are usual, whether long rows get more, and whether rows are
few, or one.
"""

from collections.abc import Iterator

import torch

from worker.kernels.gqa import GqaSpec
from worker.kernels.step import Chunk, Step
from worker.kernels.triton.gqa_lone import LONGEST, WIDEST
from worker.kernels.triton.gqa_splits import LONG, SHORT, usual_splits
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import MAX_OVERLAP_TOKENS

FEW_ROWS = 16
"""Uniform rows that take fewer keys at a time."""


def is_lone(spec: GqaSpec, dtype: torch.dtype, step: Step) -> bool:
    """Whether the step is one row for `gqa_lone`. `dtype`: of activations."""
    is_one = step.num_rows == step.num_uniform_rows == step.uniform_len == 1
    return is_one and step.max_context_len <= LONGEST and _has_lone(spec, dtype)


def _has_lone(spec: GqaSpec, dtype: torch.dtype) -> bool:
    return spec.dtype == dtype and spec.value_dim == spec.head_dim <= WIDEST


def graph_contexts(
    spec: GqaSpec, machine: Machine, dtype: torch.dtype, num_rows: int, max_context_len: int
) -> tuple[int, ...]:
    """See `CacheBuilder.graph_contexts`."""
    contexts = contexts_of(usual_splits(machine, num_rows * spec.num_kv_heads), max_context_len)
    if num_rows == 1 and _has_lone(spec, dtype) and contexts[0] > LONGEST:
        return (LONGEST, *contexts)
    return contexts


def contexts_of(num_splits: int, max_context_len: int) -> tuple[int, ...]:
    """Up to where the usual splits do, and the longest."""
    longest_usual = num_splits * LONG
    return (max_context_len,) if longest_usual >= max_context_len else (longest_usual, max_context_len)


def all_steps(
    spec: GqaSpec, machine: Machine, dtype: torch.dtype, max_rows: int, max_tokens: int, max_context_len: int
) -> Iterator[Step]:
    """Rows alone; the longest prompt; chunks, alone and beside rows."""
    for num_rows in _kinds_of_rows(spec, machine, max_rows):
        for longest in graph_contexts(spec, machine, dtype, num_rows, max_context_len):
            yield Step(num_uniform_rows=num_rows, max_context_len=longest)
    longest = min(max_tokens, max_context_len)
    yield Step(num_uniform_rows=0, chunks=(Chunk(longest, longest),), max_context_len=longest)
    yield from short_chunks(max_rows, max_tokens, max_context_len)


def short_chunks(max_rows: int, max_tokens: int, max_context_len: int) -> Iterator[Step]:
    """Of all contexts: alone, and beside so many rows that kernels do not overlap."""
    num_beside = min(MAX_OVERLAP_TOKENS, max_rows - 1)
    for longest in _doubling(SHORT, max_context_len):
        yield Step(num_uniform_rows=0, chunks=(Chunk(1, longest),), max_context_len=longest)
        chunk = Chunk(1 + MAX_OVERLAP_TOKENS - num_beside, longest)
        if num_beside + chunk.num_tokens <= max_tokens:
            yield Step(num_uniform_rows=num_beside, chunks=(chunk,), max_context_len=longest)


def _kinds_of_rows(spec: GqaSpec, machine: Machine, max_rows: int) -> list[int]:
    """Numbers of uniform rows: the least of each kind."""
    kinds: dict[tuple[int, bool, bool], int] = {}
    for num_rows in range(1, max_rows + 1):
        usual = usual_splits(machine, num_rows * spec.num_kv_heads)
        kinds.setdefault((usual, num_rows <= FEW_ROWS, num_rows == 1), num_rows)
    return list(kinds.values())


def _doubling(first: int, last: int) -> Iterator[int]:
    """From `first` while below `last`, and `last`."""
    while first < last:
        yield first
        first *= 2
    yield last
