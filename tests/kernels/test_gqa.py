"""Attention over a paged cache against float64. What no row wrote is NaN, in the cache and in new tensors."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.levels import multiplies_pairs
from tests.kernels.rig import IS_INTERPRETED, PAIRS_TOLERANCE, Rig, Rows
from worker.kernels.elementwise import RopeTable
from worker.kernels.gqa import GQA, GqaSpec, QkNorm
from worker.kernels.native.gqa import NativeGqa
from worker.kernels.step import Step
from worker.kernels.torch.gqa import TorchGqa
from worker.kernels.torch.gqa_rows import padded_rows

SHAPES = [(6, 2, 16), (4, 4, 8), (3, 1, 64)]
"""(heads, kv heads, head_dim)"""


@pytest.mark.parametrize(
    ("shape", "block_size", "context_lens"),
    [
        (SHAPES[0], 1, [17]),
        (SHAPES[2], 1, [17]),
        (SHAPES[1], 16, [1]),
        (SHAPES[0], 16, [1, 40, 16, 33]),
        (SHAPES[2], 16, [1, 40, 16, 33]),
        (SHAPES[1], 32, [20, 20, 20]),
    ],
    ids=str,
)
def test_uniform_rows(rig: Rig, shape: tuple[int, int, int], block_size: int, context_lens: list[int]) -> None:
    rows = Rows(rig, shape, [1] * len(context_lens), context_lens, block_size)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("shape", [(2, 1, 80), (2, 2, 96), (7, 1, 128), (4, 1, 256), (2, 1, 512)], ids=str)
def test_sizes_of_heads(rig: Rig, shape: tuple[int, int, int]) -> None:
    """A long row, a chunk with a prefix and one without."""
    rows = Rows(rig, shape, [1, 5, 9], [140, 40, 9], 16)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (18, 8)])
def test_values_narrower_than_keys(rig: Rig, head_dim: int, value_dim: int) -> None:
    """A long row, chunks, drafts; a window and sinks."""
    for query_lens, context_lens, uniform_len in (([1, 5, 9], [140, 40, 9], 1), ([3, 3], [60, 3], 3)):
        rows = Rows(
            rig, (4, 2, head_dim), query_lens, context_lens, 16, uniform_len=uniform_len, value_dim=value_dim,
            window=20 if uniform_len > 1 else None, has_sinks=uniform_len > 1,
        )  # fmt: skip
        rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize(
    ("shape", "block_size"), [(SHAPES[0], 16), (SHAPES[1], 1), (SHAPES[2], 1), (SHAPES[2], 16)], ids=str
)
def test_chunks_with_and_without_a_cached_prefix(rig: Rig, shape: tuple[int, int, int], block_size: int) -> None:
    """After one uniform row: no prefix, a prefix, a prefix that ends inside a block."""
    rows = Rows(rig, shape, [1, 9, 16, 5], [8, 9, 48, 30], block_size)
    rig.assert_close(rows.attend(), rows.exact())


def test_long_chunks(rig: Rig) -> None:
    """Of more than one tile of queries and of keys."""
    rows = Rows(rig, (4, 2, 16), [150, 1, 60], [150, 3, 140], 16)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_several_tokens(rig: Rig, shape: tuple[int, int, int]) -> None:
    """As drafts would be, behind a context of some length and with none."""
    rows = Rows(rig, shape, [4, 4, 4], [40, 4, 70], 16, uniform_len=4)
    rig.assert_close(rows.attend(), rows.exact())


def test_rows_of_many_tokens_and_heads(rig: Rig) -> None:
    """Wider than a tile of queries."""
    rows = Rows(rig, (32, 1, 16), [5, 5], [30, 5], 16, uniform_len=5)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize(("window", "has_sinks"), [(20, False), (None, True)])
def test_a_window_and_sinks(rig: Rig, window: int | None, has_sinks: bool) -> None:
    rows = Rows(rig, (6, 2, 16), [1, 1, 9, 5], [70, 3, 9, 40], 16, window=window, has_sinks=has_sinks)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize(("context_lens", "uniform_len", "window"), [([60, 3], 3, 20), ([50, 50], 1, 1)], ids=str)
def test_uniform_rows_with_a_window_and_sinks(rig: Rig, context_lens: list[int], uniform_len: int, window: int) -> None:
    """Drafts; and rows of one length that see themselves alone."""
    rows = Rows(
        rig, (6, 2, 16), [uniform_len] * 2, context_lens, 16, uniform_len=uniform_len, window=window, has_sinks=True
    )
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("uniform_len", [1, 3])
def test_padding_rows_write_nothing(rig: Rig, uniform_len: int) -> None:
    """Every bit of the cache outside of the rows' own tokens, and of the spare block, stays."""
    rows = Rows(rig, (6, 2, 16), [uniform_len] * 2, [20, 33], 16, uniform_len=uniform_len, num_padding=2)
    rig.assert_close(rows.attend(), rows.exact())
    written = {slot for slot in rows.buffers.token_slots[: len(rows.qkv)].tolist() if slot >= 0}
    num_blocks = rows.buffers.spare_block
    for before, after in zip(rows.before, rows.entries, strict=True):
        changed = ~torch.isclose(before, after, rtol=0, atol=0, equal_nan=True)
        blocks = {block for block in range(num_blocks) if changed[block].any()}
        assert blocks == {slot // 16 for slot in written}
        values = 2 * rows.spec.num_kv_heads * rows.spec.head_dim // len(rows.entries)
        assert changed[:num_blocks].sum() == len(written) * values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_padded_rows_equal_its_exact_ones(rig: Rig, shape: tuple[int, int, int]) -> None:
    """What torch runs where lengths are device facts, on the CPU, too."""
    rows = Rows(rig, shape, [1, 1, 1], [8, 1, 30], 16)
    if not isinstance(rows.kernel, TorchGqa):
        pytest.skip("this backend has one way alone")
    step = Step(num_uniform_rows=3, max_context_len=30)
    uniform = padded_rows(rows.spec, step, rows.buffers, rows.buffers.block_tables[:3, :2], 16)
    rig.assert_close(rows.kernel._attend_padded(rows.q, rows.cache, uniform).flatten(1), rows.exact())


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_queries_and_keys_are_normed_and_rotated(rig: Rig, head_dim: int, with_norm: bool, with_rope: bool) -> None:
    rows = Rows(rig, (4, 2, head_dim), [1, 9], [8, 9], 16)
    half = head_dim // 2
    norm = QkNorm(rig.noise(head_dim, seed=5), rig.noise(head_dim, seed=6), 1e-5) if with_norm else None
    angles = torch.arange(30)[:, None] * torch.linspace(1, 0.1, half)
    c, s = angles.cos(), angles.sin()
    rope = RopeTable(*(torch.cat(pair, -1).to(rig.device, rig.dtype) for pair in ((c, c), (-s, s))))
    q, k, v = rows.kernel.write_qkv(rows.qkv.clone(), norm, rope if with_rope else None, rows.cache, rows.metadata)
    exact_q, exact_k, exact_v = rows.qkv.double().unflatten(-1, (8, head_dim)).split([4, 2, 2], 1)
    positions = torch.tensor([7, *range(9)], device=rig.device)
    cos, sin = rope.cos.double()[positions, None, :half], rope.sin.double()[positions, None, half:]
    for got, exact, name in ((q, exact_q, "q_weight"), (k, exact_k, "k_weight")):
        if norm is not None:
            exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * getattr(norm, name).double()
        if with_rope:
            first, second = exact.chunk(2, -1)
            exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        rig.assert_close(got, exact)
    assert torch.equal(v, exact_v.to(rig.dtype))


@pytest.mark.parametrize(("head_dim", "value_dim", "rotary_dim"), [(18, 8, 6), (16, 16, 8), (24, 12, 20)])
def test_a_part_of_each_head_is_rotated(rig: Rig, head_dim: int, value_dim: int, rotary_dim: int) -> None:
    """Its first dimensions, after the norm of all."""
    rows = Rows(rig, (4, 2, head_dim), [1, 9], [8, 9], 16, value_dim=value_dim)
    kernel = rig.choose(GQA, replace(rows.spec, rotary_dim=rotary_dim))
    metadata = kernel.prepare(rows.step, rows.buffers, 16)
    (cache,) = kernel.allocate(1, rows.buffers.spare_block + 1, 16, rig.device).layers
    norm = QkNorm(rig.noise(head_dim, seed=5), rig.noise(head_dim, seed=6), 1e-5)
    half = rotary_dim // 2
    angles = torch.arange(30)[:, None] * torch.linspace(1, 0.1, half)
    c, s = angles.cos(), angles.sin()
    rope = RopeTable(*(torch.cat(pair, -1).to(rig.device, rig.dtype) for pair in ((c, c), (-s, s))))
    q, k, v = kernel.write_qkv(rows.qkv.clone(), norm, rope, cache, metadata)
    exact_q, exact_k, exact_v = rows.by_head(rows.qkv)
    positions = torch.tensor([7, *range(9)], device=rig.device)
    cos, sin = rope.cos.double()[positions, None, :half], rope.sin.double()[positions, None, half:]
    for got, exact, weight in ((q, exact_q, norm.q_weight), (k, exact_k, norm.k_weight)):
        exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        first, second, rest = exact.split((half, half, head_dim - rotary_dim), -1)
        exact = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
        rig.assert_close(got, exact)
    assert torch.equal(v, exact_v.to(rig.dtype))


def attended_at_once(rows: Rows, norm: QkNorm | None, rope: RopeTable | None) -> Tensor:
    """By `write_and_attend`, on the cache as it was before the step."""
    for entry, before in zip(rows.entries, rows.before, strict=True):
        entry.copy_(before)
    found = rows.kernel.write_and_attend(rows.qkv.clone(), norm, rope, rows.cache, rows.metadata, rows.sinks)
    if found is None:
        pytest.skip("this backend does one after the other")
    return found


@pytest.mark.parametrize(
    ("shape", "block_size", "context_len", "window", "has_sinks"),
    [
        ((4, 2, 128), 16, 1, None, False),
        ((4, 2, 128), 16, 9, None, True),
        ((6, 2, 16), 1, 17, None, False),
        ((3, 1, 80), 32, 200, None, False),
        ((4, 4, 64), 16, 505, None, False),
        ((8, 1, 256), 16, 40, 20, True),
        ((2, 1, 64), 16, 33, 1, False),
    ],
    ids=str,
)
def test_a_row_alone_is_written_and_attended_to_at_once(
    rig: Rig, shape: tuple[int, int, int], block_size: int, context_len: int, window: int | None, has_sinks: bool
) -> None:
    rows = Rows(rig, shape, [1], [context_len], block_size, window=window, has_sinks=has_sinks)
    written = [entry.clone() for entry in rows.entries]
    rig.assert_close(attended_at_once(rows, None, None), rows.exact())
    assert all(map(partial(torch.allclose, rtol=0, atol=0, equal_nan=True), rows.entries, written))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, None), (80, None), (64, 32), (18, 6)])
def test_a_row_alone_is_normed_and_rotated_as_others_are(rig: Rig, head_dim: int, rotary_dim: int | None) -> None:
    rows = Rows(rig, (4, 2, head_dim), [1], [21], 16)
    rows.kernel = rig.choose(GQA, replace(rows.spec, rotary_dim=rotary_dim))
    norm = QkNorm(rig.noise(head_dim, seed=5), rig.noise(head_dim, seed=6), 1e-5)
    angles = torch.arange(30)[:, None] * torch.linspace(1, 0.1, (rotary_dim or head_dim) // 2)
    c, s = angles.cos(), angles.sin()
    rope = RopeTable(*(torch.cat(pair, -1).to(rig.device, rig.dtype) for pair in ((c, c), (-s, s))))
    at_once = attended_at_once(rows, norm, rope)
    entries = [entry.clone() for entry in rows.entries]
    q, k, v = rows.kernel.write_qkv(rows.qkv.clone(), norm, rope, rows.cache, rows.metadata)
    rig.assert_close(at_once, rows.kernel.attend(q, k, v, rows.cache, rows.metadata).double())
    for found, expected in zip(entries, rows.entries, strict=True):
        is_there = ~expected.isnan()
        assert torch.equal(is_there, ~found.isnan())
        rig.assert_close(found[is_there], expected[is_there].double())


def test_a_row_of_padding_alone_writes_nothing(rig: Rig) -> None:
    rows = Rows(rig, (4, 2, 64), [1], [33], 16)
    rows.buffers.context_lens.zero_()
    rows.buffers.token_slots.fill_(-1)
    attended_at_once(rows, None, None)
    for before, after in zip(rows.before, rows.entries, strict=True):
        assert torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_cache_of_bfloat16_beside_floats(rig: Rig, head_dim: int) -> None:
    """All is exact but for the rounding of keys and values, and of what a processor multiplies in pairs, however the
    tokens came there; what is not finite stays."""
    shape, dtype = (6, 2, head_dim), torch.bfloat16
    if rig.dtype != torch.float32 or not rig.kernels.find(GQA, GqaSpec(*shape, 1.0, dtype), rig.dtype):
        pytest.skip("no such cache here")
    for query_lens, context_lens, uniform_len in (
        ([1, 1, 1], [1, 40, 600], 1), ([1, 9, 5], [8, 9, 40], 1), ([3, 3], [40, 3], 3),
    ):  # fmt: skip
        rows = Rows(rig, shape, query_lens, context_lens, 16, uniform_len=uniform_len, cache_dtype=dtype)
        assert all(entry.dtype == dtype for entry in rows.entries)
        in_pairs = isinstance(rows.kernel, NativeGqa) and multiplies_pairs()
        rig.assert_close(rows.attend(), rows.exact(), PAIRS_TOLERANCE if in_pairs else None)
    values = torch.tensor([1.00390625, 1.01171875, -1e38, torch.inf, torch.nan, 3.39e38, 1e-40, -0.0])
    rows = Rows(rig, shape, [1] * len(values), [1] * len(values), 16, cache_dtype=dtype)
    qkv = values[:, None].expand(-1, 10 * head_dim).contiguous()
    _, k, v = rows.kernel.write_qkv(qkv, None, None, rows.cache, rows.metadata)
    for found in (k, v):
        assert torch.equal(found[:, 0, 0].nan_to_num(7), values.bfloat16().float().nan_to_num(7))


FP8_SCALES = [(1.0, 1.0), (0.0625, 0.5)]


def fp8_rows(rig: Rig, *arguments: Any, **options: Any) -> Rows:
    if not rig.kernels.find(GQA, GqaSpec(6, 2, 16, 1.0, torch.float8_e4m3fn), rig.dtype):
        pytest.skip("no such cache here")
    return Rows(rig, *arguments, **options)


@pytest.mark.parametrize("scales", FP8_SCALES, ids=str)
def test_a_cache_of_float8(rig: Rig, scales: tuple[float, float]) -> None:
    """All is exact but for the rounding of keys and values to float8, however the tokens came there."""
    for query_lens, context_lens, uniform_len in (
        ([1, 1, 1], [1, 40, 33], 1), ([1, 9, 5], [8, 9, 40], 1), ([3, 3], [40, 3], 3),
    ):  # fmt: skip
        rows = fp8_rows(rig, (6, 2, 16), query_lens, context_lens, 16, uniform_len=uniform_len, cache_scales=scales)
        assert all(entry.dtype == torch.float8_e4m3fn for entry in rows.entries)
        rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's interpreter rounds to float8 in a way of its own")
def test_float8_loses_little(rig: Rig) -> None:
    """Three bits behind the point: at most 1/16 of each key and value, of which the sums keep less."""
    rows = fp8_rows(rig, (6, 2, 16), [1, 1, 9], [30, 40, 9], 16, cache_scales=(1.0, 1.0))
    got, rounded = rows.attend().double(), rows.exact()
    rows.cache_scales, rows.spec = None, replace(rows.spec, dtype=rig.dtype)
    exact = rows.exact()
    assert 0.001 < (rounded - exact).abs().max() / exact.abs().max() < 0.06
    assert (got - exact).abs().max() / exact.abs().max() < 0.08


@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's interpreter rounds to float8 in a way of its own")
def test_float8_is_held_within_its_range_and_hides_no_nan(rig: Rig) -> None:
    rows = fp8_rows(rig, (6, 2, 16), [1, 1, 1, 1], [1, 1, 1, 1], 16, cache_scales=(1.0, 0.5))
    values = torch.tensor([1e4, torch.inf, torch.nan, 101.0], device=rig.device, dtype=rig.dtype)
    qkv = values[:, None].expand(-1, 10 * 16).contiguous()
    _, k, v = rows.kernel.write_qkv(qkv, None, None, rows.cache, rows.metadata)
    for found, expected in ((k, [448.0, torch.nan, torch.nan, 104.0]), (v, [224.0, torch.nan, torch.nan, 104.0])):
        assert torch.equal(found[:, 0, 0].float().cpu().nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))
