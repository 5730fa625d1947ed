"""The gated delta rule for rows of many tokens, in chunks (Yang et al., arXiv 2406.06484 and 2412.06464).

Within a chunk the corrections depend on each other: they solve a unit triangular system. One kernel solves it for all
chunks at once, as far as that goes without the state: corrections = u − w × state. Another one goes through a row's
chunks with the state in registers, five small products a chunk.
"""

import triton
import triton.language as tl

from worker.kernels.triton.delta_rows import L2_EPS, log_decay_of
from worker.kernels.triton.gqa_attend import row_of_tile

PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: as good as its own, with tensor cores; without them they take a minute to compile."""


@triton.jit
def _inverse(system, i, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Of 1 + `system`, which is strictly lower triangular, [CHUNK, CHUNK] with CHUNK = 2^LEVELS.

    Blocks of twice the size from blocks along the diagonal: the inverse of ((A, 0), (B, C)) is
    ((A⁻¹, 0), (−C⁻¹ B A⁻¹, C⁻¹)). Powers of the system would grow out of all bounds where keys are alike.
    """
    row, column = i[:, None], i[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -system, 0.0))
    for level in range(1, LEVELS):
        is_between = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        between = tl.where(is_between, system, 0.0)
        step = tl.dot(inverse, between, input_precision=PRECISION)
        inverse -= tl.dot(step, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _normed(at, mask, factor):
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return x * (factor / tl.sqrt(tl.sum(x * x, 1) + L2_EPS))[:, None]


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_token"])
def prepare_chunks_kernel(
    qkv, a, b, log_decay, bias, query_starts, q_out, k_out, w_out, u_out, scores_out, since_out, gate_stride,
    first_row, num_rows, first_token,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    N: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr, TENTATIVE: tl.constexpr,
):  # fmt: skip
    """A program a chunk, of a row of more than TENTATIVE tokens, and value head; outputs begin with `first_token`,
    [tokens, heads, ...].

    Queries × what the state decayed by since before the chunk; keys × what they decay by until its end; w, u; scores of
    queries and keys, [tokens, heads, CHUNK]; and, in float32, that decay since before the chunk.
    """
    row, tile = row_of_tile(tl.program_id(0), query_starts, first_row, num_rows, CHUNK)
    head = tl.program_id(1)
    row_start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    start = row_start + tile * CHUNK
    if (start >= end) | (end - row_start <= TENTATIVE):
        return
    dtype = qkv.dtype.element_ty
    i, n, v = tl.arange(0, CHUNK), tl.arange(0, N), tl.arange(0, V)
    token = (start + i).to(tl.int64)
    is_token = token < end
    gate = tl.load(a + token * gate_stride + head, mask=is_token, other=0.0)
    log = tl.where(is_token, log_decay_of(gate, tl.load(log_decay + head), tl.load(bias + head)), 0.0)
    beta = tl.sigmoid(tl.load(b + token * gate_stride + head, mask=is_token, other=0.0).to(tl.float32))
    # Of a token and an earlier one: the sum of what lies between. As a difference of two sums it would be off, since
    # these are large where it may be small.
    is_later = i[:, None] > i[None, :]
    steps = tl.where(is_later, log[:, None], 0.0)
    between = tl.where(i[:, None] >= i[None, :], tl.exp(tl.cumsum(steps, 0)), 0.0)
    since, until = tl.exp(tl.cumsum(log, 0)), tl.exp(tl.sum(steps, 0))

    size: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    of_token = qkv + token * (2 * size + NUM_HEADS * VALUE_DIM)
    key_at = of_token[:, None] + size + head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM + n[None, :]
    in_keys, in_values = is_token[:, None] & (n < KEY_DIM)[None, :], is_token[:, None] & (v < VALUE_DIM)[None, :]
    k = _normed(key_at, in_keys, 1.0)
    narrow = k.to(dtype)
    system = tl.dot(narrow, tl.trans(narrow), input_precision=PRECISION) * between * beta[:, None]
    solved = _inverse(tl.where(is_later, system, 0.0), i, CHUNK, LEVELS).to(dtype)

    place = (token - first_token) * NUM_HEADS + head
    key_place = place[:, None] * KEY_DIM + n[None, :]
    w = tl.dot(solved, (k * (beta * since)[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(w_out + key_place, w.to(dtype), mask=in_keys)
    tl.store(k_out + key_place, (k * until[:, None]).to(dtype), mask=in_keys)
    values_at = of_token[:, None] + 2 * size + head * VALUE_DIM + v[None, :]
    values = tl.load(values_at, mask=in_values, other=0.0).to(tl.float32)
    u = tl.dot(solved, (values * beta[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(u_out + place[:, None] * VALUE_DIM + v[None, :], u.to(dtype), mask=in_values)
    q = _normed(key_at - size, in_keys, KEY_DIM**-0.5)
    scores = tl.dot(q.to(dtype), tl.trans(narrow), input_precision=PRECISION) * between
    tl.store(scores_out + place[:, None] * CHUNK + i[None, :], scores.to(dtype), mask=is_token[:, None])
    tl.store(q_out + key_place, (q * since[:, None]).to(dtype), mask=in_keys)
    tl.store(since_out + place, since, mask=is_token)


@triton.jit(do_not_specialize=["first_row", "first_token"])
def update_chunks_kernel(
    q, k, w, u, scores, since, recurrent, out, groups, query_starts, first_row, first_token,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, N: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, TENTATIVE: tl.constexpr,
):  # fmt: skip
    """A program a row of more than TENTATIVE tokens, value head and block of `VALUES` columns of its state: see
    `prepare_chunks_kernel`."""
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    if end - start <= TENTATIVE:
        return
    dtype = q.dtype.element_ty
    i, n = tl.arange(0, CHUNK), tl.arange(0, N)
    v = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = (n < KEY_DIM)[None, :], (v < VALUE_DIM)[None, :]
    state_at = recurrent + (tl.load(groups + row) * NUM_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_at += n[:, None] * VALUE_DIM + v[None, :]
    inside = (n < KEY_DIM)[:, None] & is_value
    state = tl.load(state_at, mask=inside, other=0.0)
    for first in tl.range(start, end, CHUNK, num_stages=STAGES):
        token = (first + i).to(tl.int64)
        is_token = (token < end)[:, None]
        place = ((token - first_token) * NUM_HEADS + head)[:, None]
        key_place, value_place = place * KEY_DIM + n[None, :], place * VALUE_DIM + v[None, :]
        wide = tl.load(w + key_place, mask=is_token & is_key, other=0.0)
        queries = tl.load(q + key_place, mask=is_token & is_key, other=0.0)
        keys = tl.load(k + key_place, mask=is_token & is_key, other=0.0)
        alone = tl.load(u + value_place, mask=is_token & is_value, other=0.0).to(tl.float32)
        of_keys = tl.load(scores + place * CHUNK + i[None, :], mask=is_token, other=0.0)
        last = tl.minimum(first + CHUNK, end) - 1
        decay = tl.load(since + (last - first_token).to(tl.int64) * NUM_HEADS + head)
        narrow = state.to(dtype)
        corrections = (alone - tl.dot(wide, narrow, input_precision=PRECISION)).to(dtype)
        found = tl.dot(queries, narrow, input_precision=PRECISION)
        found = tl.dot(of_keys, corrections, found, input_precision=PRECISION)
        state = tl.dot(tl.trans(keys), corrections, state * decay, input_precision=PRECISION)
        out_at = out + (token[:, None] * NUM_HEADS + head) * VALUE_DIM + v[None, :]
        tl.store(out_at, found.to(out.dtype.element_ty), mask=is_token & is_value)
    tl.store(state_at, state, mask=inside)
