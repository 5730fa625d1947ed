"""Choosing tokens: one pass over the logits for greedy rows and plain draws, two more for truncated ones.

A pass leaves the best logit of each chunk of the vocabulary, and its mass, the sum of exp(logit − best) at the row's
temperature. The rest looks at chunks, and at the one that wins.

In steps of many rows these kernels overlap, too: all programs of the one before have begun by then, and nothing more
waits for their places.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.sampling import CHUNK, FAILED, ChooseKernel, Draws
from worker.kernels.step import SlotTables
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before
from worker.kernels.triton.prepare import keep_token
from worker.kernels.triton.sample_limits import NO_LIMIT, find_limits
from worker.kernels.triton.sample_parts import bits_of, distance_of, is_drawn, load_logits, random_uniform

TILE_CHUNKS = 32
"""Chunks that a program of the first pass looks at."""

_CHUNK = tl.constexpr(CHUNK)
_FAILED = tl.constexpr(FAILED)


@triton.jit
def _chunk_kernel(
    logits, rows, floats, slots, chunk_best, chunk_mass, stride, vocab_size, num_chunks,
    HAS_ROWS: tl.constexpr, HAS_MASS: tl.constexpr, IS_MODEL: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """IS_MODEL: at temperature 1, whatever the rows ask for."""
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0)
    source = row.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows + row)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    x = load_logits(logits + source * stride, token, token < vocab_size)
    best = tl.max(x, 1)
    place = row * num_chunks + chunk
    tl.store(chunk_best + place, best, mask=chunk < num_chunks)
    if HAS_MASS:
        temperature = tl.full([], 1.0, tl.float32)
        if not IS_MODEL:
            temperature = tl.load(floats + tl.load(slots + row) * 6).to(tl.float32)
        if is_drawn(temperature):
            # A chunk of nothing but −inf has no mass.
            top = tl.where(best == float("-inf"), 0.0, best)
            mass = tl.sum(tl.exp(-distance_of(x, top[:, None], temperature)), 1)
            tl.store(chunk_mass + place, mask=chunk < num_chunks, value=mass)


@triton.jit
def _winner(mass, uniform, is_there):
    """The exponential race; the first of equals."""
    return tl.argmax(tl.where(is_there, mass.to(tl.float64) / -tl.log(uniform), -1.0), 0)


@triton.jit
def _pick_kernel(
    logits, rows, integers, floats, slots, positions, chunk_best, chunk_mass, limits, out, tokens, lengths, stride,
    vocab_size, num_chunks, tokens_stride, HAS_ROWS: tl.constexpr, HAS_DRAWS: tl.constexpr, HAS_LIMITS: tl.constexpr,
    REMEMBERS: tl.constexpr, NO_LIMIT: tl.constexpr, PAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0)
    source = row.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows + row)
    logits += source * stride
    chunk, member = tl.arange(0, PAD), tl.arange(0, _CHUNK)
    place = row * num_chunks + chunk
    bests = tl.load(chunk_best + place, mask=chunk < num_chunks, other=float("-inf"))
    best = tl.max(bests)
    found = tl.full([], _FAILED, tl.int64)
    if tl.abs(best) < float("inf"):
        temperature = tl.full([], 0.0, tl.float32)
        if HAS_DRAWS:
            slot = tl.load(slots + row)
            temperature = tl.load(floats + slot * 6).to(tl.float32)
        if is_drawn(temperature):
            if HAS_DRAWS:
                seed, position = tl.load(integers + slot * 3 + 1), tl.load(positions + row)
                limit = tl.full([], NO_LIMIT, tl.int32)
                if HAS_LIMITS:
                    limit = tl.load(limits + row)
                mass = tl.load(chunk_mass + place, mask=chunk < num_chunks, other=0.0)
                if limit == NO_LIMIT:
                    mass *= tl.exp(-distance_of(bests, best, temperature))
                winner = _winner(mass, random_uniform(seed, position, 0, chunk), chunk < num_chunks)
                token = winner * _CHUNK + member
                distance = distance_of(load_logits(logits, token, token < vocab_size), best, temperature)
                kept = tl.where(bits_of(distance) <= limit, tl.exp(-distance), 0.0)
                drawn = _winner(kept, random_uniform(seed, position, 1, member), token < vocab_size)
                found = (winner * _CHUNK + drawn).to(tl.int64)
        else:
            first = tl.min(tl.where(bests == best, chunk, PAD)) * _CHUNK + member
            is_best = load_logits(logits, first, first < vocab_size) == best
            found = tl.min(tl.where(is_best, first, vocab_size)).to(tl.int64)
    tl.store(out + row, found)
    if REMEMBERS:
        keep_token(tokens, lengths, tl.load(slots + row), tl.load(positions + row), found, tokens_stride, True)


def chunk_stats(
    logits: Tensor, rows: Tensor | None, num_rows: int, draws: Draws | None, *, has_mass: bool, overlaps: bool
) -> tuple[Tensor, Tensor]:
    """Each chunk's best logit (+inf if one is NaN) and mass, float32 [R, chunks]. Without `draws`: at temperature 1."""
    num_chunks = triton.cdiv(logits.shape[1], CHUNK)
    best = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    mass = torch.empty_like(best) if has_mass else best
    _chunk_kernel[(num_rows, triton.cdiv(num_chunks, TILE_CHUNKS))](
        logits, rows,
        draws.parameters.floats if draws is not None else None, draws.slots if draws is not None else None,
        best, mass, logits.stride(0), logits.shape[1], num_chunks,
        rows is not None, has_mass, draws is None, TILE_CHUNKS, overlaps, num_warps=4, **launch_options(overlaps),
    )  # fmt: skip
    return best, mass


class TritonChoose(ChooseKernel):
    def __init__(self, machine: Machine) -> None:
        self._overlaps = machine.can_overlap

    def __call__(
        self, logits: Tensor, rows: Tensor | None, draws: Draws, remembered: SlotTables | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rules, parameters, num_rows = draws.rules, draws.parameters, len(draws.slots)
        has_draws = rules.num_drawn > 0
        has_limits = has_draws and bool(rules.most_top_k or rules.has_top_p or rules.has_min_p)
        best, mass = chunk_stats(logits, rows, num_rows, draws, has_mass=has_draws, overlaps=self._overlaps)
        limits = None
        if has_limits:
            limits = find_limits(logits, rows, rules, parameters.integers, parameters.floats, draws.slots, best, mass)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
        tokens, lengths = (remembered.tokens, remembered.lengths) if remembered is not None else (token_ids, token_ids)
        _pick_kernel[(num_rows,)](
            logits, rows, parameters.integers, parameters.floats, draws.slots, draws.positions, best, mass, limits,
            token_ids, tokens, lengths, logits.stride(0), logits.shape[1], best.shape[1], tokens.stride(0),
            rows is not None, has_draws, has_limits, remembered is not None, NO_LIMIT,
            triton.next_power_of_2(best.shape[1]), self._overlaps, num_warps=4, **launch_options(self._overlaps),
        )  # fmt: skip
        return token_ids
