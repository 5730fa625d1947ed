"""The native backend beyond what all backends have to do: how it is had, and what it promises of rows and layers."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.levels import LEVELS_OF_ATTENTION, at_level, forget_library, multiplies_pairs
from tests.kernels.rig import CPU, HAS_NATIVE, INT8_TOLERANCE, PAIRS_TOLERANCE, Rig, Row, Rows, buffers_for
from tests.kernels.sampling_rig import MANY, Asks, draws_of
from worker.kernels.linear import LINEAR, TABLE, LinearSpec
from worker.kernels.native import build, library
from worker.kernels.native.build import LEVELS, BuildError, Level, best_level, this_cpu
from worker.kernels.native.linear import NativeLinear
from worker.kernels.sampling import CHOOSE
from worker.kernels.select import Kernels
from worker.kernels.torch import sample as torch_sample
from worker.kernels.torch.fp8 import to_fp8
from worker.kernels.weights import Blocks, Dense

pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="needs AVX2 and a C++ compiler")


@pytest.fixture
def rig() -> Rig:
    return Rig(Kernels(CPU, "native"), torch.float32)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine that has never compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "BROUGHT", tmp_path)
    forget_library()
    yield
    forget_library()


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_a_product_of_no_rows_is_empty(rig: Rig, bits: int) -> None:
    weight = rig.noise(70, 96, seed=1)
    linear = rig.choose(LINEAR, LinearSpec(96, 70, Dense if bits == 32 else Blocks))
    packed = linear.pack(Dense(weight) if bits == 32 else Blocks.of(weight, bits))
    x = rig.noise(1, 96)[:0]
    assert linear(x, packed).shape == (0, 70)
    find = linear.finder(packed)
    assert find is not None and find(x).shape == (0,)


@pytest.mark.parametrize("rows", [1, 3, 12, 25])
def test_a_row_is_the_same_alone_and_in_any_batch(rig: Rig, rows: int) -> None:
    spec = LinearSpec(160, 100)
    linear = rig.choose(LINEAR, spec)
    packed = linear.pack(Dense(rig.noise(100, 160, seed=1)))
    x = rig.noise(25, 160)
    assert torch.equal(linear(x[:rows], packed), linear(x, packed)[:rows])


@pytest.mark.parametrize(
    ("bits", "block", "is_centred"), [(4, 32, False), (8, 32, False), (8, 16, False), (8, 32, True), (8, 16, True)]
)
@pytest.mark.parametrize("in_features", [1056, 96])
def test_a_row_of_blocks_is_the_same_alone_and_among_many(
    rig: Rig, bits: int, block: int, is_centred: bool, in_features: int
) -> None:
    """Of more inputs, and more rows, than are taken at a time where blocks are unpacked; a panel that is not full."""
    linear = rig.choose(LINEAR, LinearSpec(in_features, 70, Blocks))
    weight = Blocks.of(rig.noise(70, in_features, seed=1), bits).in_form(bits, block)
    packed = linear.pack(replace(weight, minima=weight.scales * -128) if is_centred else weight)
    x = rig.noise(200, in_features)
    alone = torch.cat([linear(row[None], packed) for row in x])
    for rows in (6, 13, 14, 15, 145, 200):
        assert torch.equal(linear(x[:rows], packed), alone[:rows])


def test_a_row_attends_the_same_alone_and_in_any_batch(rig: Rig) -> None:
    """Of more keys than are taken at a time, and cut among the threads."""
    rows = Rows(rig, (6, 2, 16), [1, 1, 1], [700, 3, 300], 16)
    alone = Rows(rig, (6, 2, 16), [1], [700], 16)
    for to, source in ((alone.cache.k, rows.cache.k), (alone.cache.v, rows.cache.v)):
        to[alone.rows[0].table] = source[rows.rows[0].table]
    together = rows.kernel.attend(rows.q, rows.k, rows.v, rows.cache, rows.metadata)
    mine = rows.kernel.attend(rows.q[:1], rows.k[:1], rows.v[:1], alone.cache, alone.metadata)
    assert torch.equal(together[:1], mine)


@pytest.fixture(params=LEVELS_OF_ATTENTION, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[Level]:
    """Of the kernels that the test makes. Compiled once, in some seconds."""
    with at_level(request.param):
        yield request.param


@pytest.mark.parametrize("out_features", [4128, 4130])
def test_a_product_of_more_than_a_cache_holds_is_the_same(level: Level, rig: Rig, out_features: int) -> None:
    """Written past the caches, of rows that begin a vector and of others."""
    linear = rig.choose(LINEAR, LinearSpec(32, out_features))
    packed = linear.pack(Dense(rig.noise(out_features, 32, seed=1), rig.noise(out_features, seed=2)))
    x = rig.noise(80, 32)
    assert torch.equal(linear(x, packed), torch.cat([linear(row[None], packed) for row in x]))


HALF = torch.bfloat16
CACHE_DTYPES = [torch.float32, HALF, torch.int8]


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_a_cache_of_bfloat16_at_each_level(level: Level, rig: Rig, head_dim: int, block_size: int) -> None:
    """Odd lengths and even ones, with infinities where nobody wrote: a last key shares a pair with one of them. And
    only what is a token's own is written."""
    tolerance = PAIRS_TOLERANCE if multiplies_pairs() and block_size > 1 else None
    for query_lens, context_lens in (([1, 1, 1, 1], [1, 40, 601, 256]), ([1, 150, 5, 4], [9, 151, 300, 33])):
        rows = Rows(
            rig, (7, 1, head_dim), query_lens, context_lens, block_size, scale=head_dim**-0.5, cache_dtype=HALF,
            garbage=torch.inf,
        )  # fmt: skip
        rig.assert_close(rows.attend(), rows.exact(), tolerance)
        for before, after in zip(rows.before, rows.entries, strict=True):
            assert (before != after).sum() == sum(query_lens) * head_dim


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("shape", [(7, 1, 16), (6, 3, 80), (2, 2, 128), (4, 1, 256)], ids=str)
def test_a_cache_of_int8_at_each_level(level: Level, rig: Rig, shape: tuple[int, int, int], block_size: int) -> None:
    """Exact but for the rounding of queries, keys, values and weights; with scales of NaN where nobody wrote. And only
    what is a token's own is written."""
    for query_lens, context_lens in (([1, 1, 1, 1], [1, 40, 601, 256]), ([1, 150, 5, 4], [9, 151, 300, 33])):
        rows = Rows(rig, shape, query_lens, context_lens, block_size, scale=0.15, cache_dtype=torch.int8)
        rig.assert_close(rows.attend(), rows.exact(), INT8_TOLERANCE)
        _, k, v = rows.by_head(rows.qkv)
        rig.assert_close(rows.k, rows.as_cached(k, 0))
        rig.assert_close(rows.v, rows.as_cached(v, 1))
        most = sum(query_lens) * shape[1] * (shape[2] + 4)
        for before, after in zip(rows.before, rows.entries, strict=True):
            assert 0.9 * most < (before != after).sum() <= most


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e12])
def test_int8_has_a_scale_for_each_token_and_head(level: Level, rig: Rig, size: float) -> None:
    """However large or small one is beside the others; and one whose value is zero weighs what it should."""
    rows = Rows(rig, (4, 2, 16), [40], [40], 16, scale=0.25, cache_dtype=torch.int8)
    rows.qkv[7, 6 * 16 :] *= size
    rows.qkv[20, 6 * 16 :] = 0
    rows.q, rows.k, rows.v = rows.kernel.write_qkv(rows.qkv.clone(), None, None, rows.cache, rows.metadata)
    found, exact = rows.attend(), rows.exact()
    for token in range(40):
        rig.assert_close(found[token], exact[token], INT8_TOLERANCE)


def test_int8_loses_little(level: Level, rig: Rig) -> None:
    rows = Rows(rig, (6, 2, 64), [1, 1, 9], [300, 40, 9], 16, scale=0.125, cache_dtype=torch.int8)
    found = rows.attend().double()
    rows.spec = replace(rows.spec, dtype=torch.float32)
    exact = rows.exact()
    assert 1e-3 < (found - exact).abs().max() / exact.abs().max() < 0.02


@pytest.mark.skipif(len(LEVELS_OF_ATTENTION) < 2, reason="this processor has one level")
def test_int8_is_the_same_at_levels_of_as_wide_vectors(rig: Rig) -> None:
    """Its sums are of whole numbers."""
    found = []
    for level in (level for level in LEVELS if level.cpu_flags <= this_cpu() and level.name != "avx2"):
        with at_level(level):
            rows = Rows(rig, (6, 2, 16), [1, 1, 150, 5], [700, 3, 150, 30], 16, cache_dtype=torch.int8)
            found.append(rows.attend())
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_prompt_attends_the_same_whole_and_in_chunks(
    level: Level, rig: Rig, head_dim: int, cache_dtype: torch.dtype
) -> None:
    """Chunks of few tokens, whose keys are cut among threads, of a tile and of several, with odd ends; alone and
    beside others."""
    rows = Rows(rig, (6, 2, head_dim), [600], [600], 16, cache_dtype=cache_dtype)
    whole, table = rows.attend(), rows.rows[0].table
    ends = [0, 1, 4, 5, 9, 50, 131, 255, 256, 258, 417, 598, 599, 600]
    chunks = [(begin, end, Row(end - begin, end, table)) for begin, end in itertools.pairwise(ends)]
    for begin, end, chunk in chunks:
        _, metadata = rows._prepare([chunk], 0)
        alone = rows.kernel.attend(rows.q[begin:end], rows.k[begin:end], rows.v[begin:end], rows.cache, metadata)
        assert torch.equal(alone, whole[begin:end])
    rows.buffers = buffers_for([chunk for _, _, chunk in chunks], len(table) + 3, CPU)
    _, metadata = rows._prepare([chunk for _, _, chunk in chunks], 0)
    assert torch.equal(rows.kernel.attend(rows.q, rows.k, rows.v, rows.cache, metadata), whole)


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [(HALF, None), (torch.int8, INT8_TOLERANCE)], ids=str)
def test_weights_that_are_rounded_add_up_to_one(
    level: Level, rig: Rig, cache_dtype: torch.dtype, tolerance: float | None
) -> None:
    """Values that are all the same come out as they are."""
    rows = Rows(rig, (6, 2, 16), [1, 300], [1, 300], 16, cache_dtype=cache_dtype)
    qkv = rows.qkv.clone()
    qkv[:, 8 * 16 :] = 1.5
    q, k, v = rows.kernel.write_qkv(qkv, None, None, rows.cache, rows.metadata)
    out = rows.kernel.attend(q, k, v, rows.cache, rows.metadata)
    rig.assert_close(out, torch.full_like(out, 1.5).double(), tolerance)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("head", [0, 8, 10], ids=["query", "key", "value"])
@pytest.mark.parametrize("cache_dtype", [HALF, torch.int8], ids=str)
def test_what_is_not_finite_stays_so_at_each_level(
    level: Level, rig: Rig, cache_dtype: torch.dtype, value: float, head: int
) -> None:
    """In results of its own token, but where a score of -inf weighs nothing; heads that do not see it, and other rows,
    are as they were."""
    rows = Rows(rig, (8, 2, 16), [1, 1], [20, 9], 16, cache_dtype=cache_dtype)
    qkv = rows.qkv.clone()
    qkv[0, head * 16 + 3] = value
    q, k, v = rows.kernel.write_qkv(qkv, None, None, rows.cache, rows.metadata)
    out = rows.kernel.attend(q, k, v, rows.cache, rows.metadata, None).unflatten(-1, (8, 16))
    is_finite = out.isfinite().all(-1)
    assert not is_finite[0, :4].all() and is_finite[0, 4:].all() and is_finite[1].all()


@pytest.mark.skipif(len(LEVELS_OF_ATTENTION) < 2, reason="this processor has one level")
@pytest.mark.parametrize("cache_scales", [None, (1.0, 0.5)], ids=["floats", "float8"])
def test_other_caches_are_the_same_with_pairs_and_without(rig: Rig, cache_scales: tuple[float, float] | None) -> None:
    found = []
    for level in LEVELS_OF_ATTENTION[:-1]:
        with at_level(level):
            rows = Rows(rig, (6, 2, 16), [1, 1, 150, 5], [700, 3, 150, 30], 16, cache_scales=cache_scales)
            found.append(rows.attend())
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_tokens_of_a_whole_vocabulary_are_those_that_torch_chooses(rig: Rig, scale: float) -> None:
    """Flat and peaked rows: a top-k above the number of chunks, a top-p that thousands of tokens hold."""
    some = [*MANY, *(Asks(temperature=0.8, top_p=0.9, seed=i) for i in range(20))]
    logits = rig.noise(len(some), 49_152) * scale
    draws = draws_of(some, list(range(len(some))), logits.shape[1], CPU)
    assert torch.equal(rig.choose(CHOOSE, None)(logits, None, draws), torch_sample.choose(logits, None, draws))


def test_threads_that_have_to_share_a_core_do_not_wait_awake_for_each_other(rig: Rig) -> None:
    """Four of them on one core take little more processor time than one: barriers of OpenMP took many times as much."""
    linear = rig.choose(LINEAR, LinearSpec(512, 512))
    packed = linear.pack(Dense(rig.noise(512, 512, seed=1)))
    x, out = rig.noise(8, 512), torch.empty(8, 512)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
    try:
        alone, four = (library.Engine(library._functions(), num_threads) for num_threads in (1, 4))
        used = {engine: processor_seconds(lambda e=engine: e.product(packed.view, x, out)) for engine in (alone, four)}
    finally:
        os.sched_setaffinity(0, cores)
    assert used[four] < 3 * used[alone]


def processor_seconds(work: Callable[[], None]) -> float:
    """Of all threads of this process, the least of some trials."""
    trials = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(100):
            work()
        trials.append(time.process_time() - begin)
    return min(trials)


def test_a_table_gives_its_rows_back(rig: Rig) -> None:
    weight = rig.noise(70, 32)
    table = rig.choose(TABLE, LinearSpec(32, 70))
    packed = table.pack(Dense(weight))
    ids = torch.tensor([0, 69, 33, 33])
    assert torch.equal(table.rows(packed, ids), weight[ids])
    for wrong in (-1, 70):
        with pytest.raises(IndexError, match="index out of range"):
            table.rows(packed, torch.tensor([3, wrong]))


def test_the_level_follows_from_what_the_processor_says() -> None:
    every = frozenset().union(*(level.cpu_flags for level in LEVELS))
    assert best_level(every).name == "avx512bf16"
    assert best_level(every - {"avx512_bf16"}).name == "avx512vnni"
    assert best_level(every - {"avx512_vnni"}).name == "avx512"
    assert best_level(every - {"avx512bw"}).name == "avx2"
    with pytest.raises(BuildError, match="no AVX2"):
        best_level(every - {"fma"})


@pytest.fixture
def oldest_level() -> Iterator[None]:
    with at_level(LEVELS[-1]):
        yield


@pytest.mark.usefixtures("oldest_level")
def test_the_oldest_level_computes_the_same() -> None:
    """It has vectors of half the size. Compiled here, once, in some seconds."""
    rig = Rig(Kernels(CPU, "native"), torch.float32)
    linear = rig.choose(LINEAR, LinearSpec(96, 131))
    x, weight, bias = rig.noise(9, 96), rig.noise(131, 96, seed=1), rig.noise(131, seed=2)
    rig.assert_close(linear(x, linear.pack(Dense(weight, bias))), x.double() @ weight.double().T + bias.double())
    rows = Rows(rig, (6, 2, 16), [1, 1, 9, 5], [700, 3, 9, 30], 16)
    rig.assert_close(rows.attend(), rows.exact())
    eight_bits = torch.randint(-127, 128, (9, 96), generator=torch.Generator().manual_seed(3)).float()
    eight_bits[:, ::32] = 127  # so that rows of activations are what they are rounded to
    for bits, block in ((4, 32), (8, 32), (8, 16)):
        blocks = Blocks.of(weight, bits).in_form(bits, block)
        product = rig.choose(LINEAR, LinearSpec(96, 131, Blocks))
        rig.assert_close(product(eight_bits, product.pack(blocks)), eight_bits.double() @ blocks.floats().double().T)


@pytest.mark.usefixtures("no_library")
def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "COMPILERS", ())
    assert "no C++ compiler" in str(library.obstacle())
    assert not isinstance(Kernels(CPU).choose(LINEAR, LinearSpec(32, 32), torch.float32), NativeLinear)


@pytest.mark.usefixtures("no_library")
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.h:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "x.h:1: error: no such thing" in str(library.obstacle())
    assert [path.name for path in build.user_cache().iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot hold .*; XDG_CACHE_HOME may name a folder that can"):
        build.library(LEVELS[0], tmp_path / "file")


def test_keys_and_values_become_the_nearest_float8() -> None:
    """As torch rounds them: all sizes there are, halves between two neighbours, beyond both ends, both signs."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat((halves.nextafter(torch.tensor(torch.inf)), halves.nextafter(torch.tensor(-torch.inf))))
    found = torch.cat((numbers, halves, near, torch.tensor([1e-9, -1e-9, 460.0, -470.0, 1e30, -1e30])))
    found = torch.cat((found, found.new_zeros(-len(found) % 16)))
    rows = Rows(Rig(Kernels(CPU, "native"), torch.float32), (2, 2, 16), [1] * (len(found) // 16),
                [1] * (len(found) // 16), 16, cache_scales=(1.0, 0.5))  # fmt: skip
    qkv = found.view(-1, 16).repeat(1, 6)
    _, k, v = rows.kernel.write_qkv(qkv, None, None, rows.cache, rows.metadata)
    assert torch.equal(k[:, 0].flatten(), to_fp8(found, 1.0).float())
    assert torch.equal(v[:, 1].flatten(), to_fp8(found, 0.5).float() * 0.5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head", [8, 10], ids=["key", "value"])
def test_a_cache_of_float8_hides_no_nan_from_the_token_that_wrote_it(value: float, head: int) -> None:
    """Of 8 query heads, 2 of keys and 2 of values; the other key head's queries, and other rows, are as they were."""
    rows = Rows(Rig(Kernels(CPU, "native"), torch.float32), (8, 2, 16), [1, 1], [20, 9], 16, cache_scales=(1.0, 1.0))
    qkv = rows.qkv.clone()
    qkv[0, head * 16 + 3] = value
    q, k, v = rows.kernel.write_qkv(qkv, None, None, rows.cache, rows.metadata)
    out = rows.kernel.attend(q, k, v, rows.cache, rows.metadata, None).unflatten(-1, (8, 16))
    assert out[0, :4].isnan().all() and out[0, 4:].isfinite().all() and out[1].isfinite().all()
