"""The copy of edited rows, and log probabilities: sums and a few places, never a matrix of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.sampling import CHUNK
from worker.kernels.torch.sample import token_logprobs as torch_logprobs
from worker.kernels.triton.sample import chunk_stats
from worker.kernels.triton.sample_parts import load_logits

FEW, MOST = 4, 32
"""Most likely tokens that a program has places for; for more, torch."""
TILE = 4096

_CHUNK = tl.constexpr(CHUNK)
_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _copy_kernel(
    logits, rows, mask, copy, tile_best, stride, vocab_size, num_words, num_tiles,
    HAS_ROWS: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row)
    token = tile * TILE + tl.arange(0, TILE)
    is_there = token < vocab_size
    x = load_logits(logits + source * stride, token, is_there)
    tl.store(tile_best + row * num_tiles + tile, tl.max(x))
    if HAS_MASK:
        word = tl.load(mask + row * num_words + token // 32, mask=is_there, other=0)
        x = tl.where(((word >> (token % 32)) & 1) == 1, x, float("-inf"))
    tl.store(copy + row * vocab_size + token, x, mask=is_there)


@triton.jit
def _rank_kernel(logits, rows, token_ids, ranks, stride, vocab_size, HAS_ROWS: tl.constexpr, TILE: tl.constexpr):
    """How many logits are larger than that of the row's token."""
    row = tl.program_id(0)
    source = row.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows + row)
    logits += source * stride
    chosen = tl.load(logits + tl.maximum(tl.load(token_ids + row), 0)).to(tl.float32)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = load_logits(logits, token, token < vocab_size)
    tl.atomic_add(ranks + row, tl.sum((x > chosen).to(tl.int32)))


@triton.jit
def _key_of(x, index):
    """int64 that orders by value, then by falling index."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["most"])
def _logprobs_kernel(
    logits, rows, token_ids, ranks, chunk_best, chunk_mass, out_ids, out_logprobs, out_ranks,
    stride, vocab_size, num_chunks, most, HAS_ROWS: tl.constexpr, PAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A program a row. The most likely tokens are in as many chunks, those whose best are the largest."""
    row = tl.program_id(0)
    source = row.to(tl.int64)
    if HAS_ROWS:
        source = tl.load(rows + row)
    logits += source * stride
    chunk, place = tl.arange(0, PAD), tl.arange(0, MOST)
    bests = tl.load(chunk_best + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    mass = tl.load(chunk_mass + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    best = tl.max(bests)
    total = best + tl.log(tl.sum(mass * tl.exp(bests - best)))

    first = row.to(tl.int64) * (1 + most)
    chosen_id = tl.maximum(tl.load(token_ids + row), 0)
    tl.store(out_ids + first, chosen_id)
    tl.store(out_logprobs + first, tl.load(logits + chosen_id).to(tl.float32) - total)
    tl.store(out_ranks + first, tl.load(ranks + row).to(tl.int64) + 1)

    keys = tl.where(chunk < num_chunks, _key_of(bests, chunk), _LEAST)
    chunks = tl.full([MOST], num_chunks, tl.int32)
    for i in range(tl.minimum(most, num_chunks)):
        key = tl.max(keys)
        chunks = tl.where(place == i, _index_of(key), chunks)
        keys = tl.where(keys == key, _LEAST, keys)

    token = chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    members = tl.where(token < vocab_size, _key_of(load_logits(logits, token, token < vocab_size), token), _LEAST)
    ids = tl.zeros([MOST], tl.int32)
    for i in range(most):
        key = tl.max(members)
        ids = tl.where(place == i, _index_of(key), ids)
        members = tl.where(members == key, _LEAST, members)
    is_asked = place < most
    out = first + 1 + place
    tl.store(out_ids + out, ids.to(tl.int64), mask=is_asked)
    values = tl.load(logits + ids, mask=is_asked, other=0.0).to(tl.float32)
    tl.store(out_logprobs + out, values - total, mask=is_asked)
    tl.store(out_ranks + out, (place + 1).to(tl.int64), mask=is_asked)


def masked_copy(logits: Tensor, rows: Tensor | None, num_rows: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `MaskedCopyKernel`."""
    vocab_size = logits.shape[1]
    num_tiles = triton.cdiv(vocab_size, TILE)
    copy = logits.new_empty(num_rows, vocab_size, dtype=torch.float32)
    tile_best = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    _copy_kernel[(num_rows, num_tiles)](
        logits, rows, mask, copy, tile_best, logits.stride(0), vocab_size,
        mask.stride(0) if mask is not None else 0, num_tiles,
        rows is not None, mask is not None, TILE, num_warps=4,
    )  # fmt: skip
    return copy, tile_best.amax(-1).isfinite()


def token_logprobs(logits: Tensor, rows: Tensor | None, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `LogprobsKernel`."""
    if most > MOST:
        return torch_logprobs(logits, rows, token_ids, most)
    num_rows, vocab_size = len(token_ids), logits.shape[1]
    best, mass = chunk_stats(logits, rows, num_rows, None, has_mass=True, overlaps=False)
    larger = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    _rank_kernel[(num_rows, triton.cdiv(vocab_size, TILE))](
        logits, rows, token_ids, larger, logits.stride(0), vocab_size, rows is not None, TILE, num_warps=4
    )
    ids, ranks = (logits.new_empty(num_rows, 1 + most, dtype=torch.int64) for _ in range(2))
    logprobs = logits.new_empty(num_rows, 1 + most, dtype=torch.float32)
    _logprobs_kernel[(num_rows,)](
        logits, rows, token_ids, larger, best, mass, ids, logprobs, ranks,
        logits.stride(0), vocab_size, best.shape[1], most,
        rows is not None, triton.next_power_of_2(best.shape[1]), FEW if most <= FEW else MOST, num_warps=8,
    )  # fmt: skip
    return ids, logprobs, ranks
