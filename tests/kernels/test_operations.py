"""Each operation of the kernel table against a float64 reference. A new backend joins by its name in BACKENDS."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from worker.kernels.interface import (
    EMBEDDING,
    GQA,
    LINEAR,
    MOVE_ENTRIES,
    PREPARE_STEP,
    RANDOM_UNIFORM,
    RMS_NORM,
    SILU_AND_MUL,
    ActivationSpec,
    EmbeddingSpec,
    GqaSpec,
    KernelT,
    LinearSpec,
    NormSpec,
    Operation,
    QkNorm,
    RopeTable,
    SpecT,
)
from worker.kernels.select import Kernels
from worker.kernels.step import Chunk, SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.torch import linear as torch_linear
from worker.kernels.torch.linear import OneDnnLinear, PlainLinear
from worker.kernels.weights import Dense
from worker.parallel.group import Group

CPU = torch.device("cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    BACKENDS = [("triton", "cpu")]
else:
    BACKENDS = [("torch", "cpu")] + ([(name, "cuda") for name in ("torch", "triton")] * torch.cuda.is_available())
DTYPES = [torch.float32, torch.float16 if IS_INTERPRETED else torch.bfloat16]
"""Triton's interpreter cannot compute in bfloat16."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Rig:
    """A backend's kernels in one dtype."""

    kernels: Kernels
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.kernels.device

    def choose(self, operation: Operation[SpecT, KernelT], spec: SpecT) -> KernelT:
        return self.kernels.choose(operation, spec, self.dtype)

    def noise(self, *shape: int, seed: int = 0) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, self.dtype)

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        """Error relative to the largest expected value."""
        assert got.shape == expected.shape and got.dtype == self.dtype
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[self.dtype]


@pytest.fixture(params=BACKENDS, ids="-".join)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    name, device = request.param
    return Kernels(torch.device(device), name)


@pytest.fixture(params=DTYPES, ids=str)
def rig(request: pytest.FixtureRequest, kernels: Kernels) -> Rig:
    return Rig(kernels, request.param)


@pytest.mark.parametrize("tokens", [1, 7])
def test_rms_norm(rig: Rig, tokens: int) -> None:
    x, weight = rig.noise(tokens, 96), rig.noise(96, seed=1)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    rig.assert_close(rig.choose(RMS_NORM, NormSpec(96)).norm(x, weight, 1e-5), exact)


def test_add_rms_norm_updates_the_residual_in_place(rig: Rig) -> None:
    x, residual, weight = rig.noise(5, 96), rig.noise(5, 96, seed=1), rig.noise(96, seed=2)
    total = x.double() + residual.double()
    normed, same = rig.choose(RMS_NORM, NormSpec(96)).add_norm(x, residual, weight, 1e-5, Group())
    assert same.data_ptr() == residual.data_ptr()
    rig.assert_close(residual, total)
    exact = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    rig.assert_close(normed, exact)


def test_silu_and_mul(rig: Rig) -> None:
    x = rig.noise(5, 128)
    gate, up = x.double().chunk(2, -1)
    exact = gate * gate.sigmoid() * up
    rig.assert_close(rig.choose(SILU_AND_MUL, ActivationSpec(64))(x), exact)


def test_embedding(rig: Rig) -> None:
    table = rig.noise(50, 8)
    ids = torch.tensor([3, 49, 0, 3], device=rig.device)
    assert torch.equal(rig.choose(EMBEDDING, EmbeddingSpec(8))(ids, table), table[ids])


@pytest.mark.parametrize("rows", [1, 3, 32, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rig: Rig, rows: int, with_bias: bool) -> None:
    x, weight = rig.noise(rows, 96), rig.noise(131, 96, seed=1)
    bias = rig.noise(131, seed=2) if with_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    linear = rig.choose(LINEAR, LinearSpec(96, 131))
    packed = linear.pack(Dense(weight, bias))
    rig.assert_close(linear(x, packed), exact)
    out = torch.full_like(exact, torch.nan, dtype=rig.dtype)
    assert linear(x, packed, out).data_ptr() == out.data_ptr()
    rig.assert_close(out, exact)


# --- attention

SHAPES = [(6, 2, 16), (4, 4, 8), (3, 1, 64)]
SCALE = 0.3


class Rows:
    """Rows of a step with random qkv, and a cache with their histories scattered over blocks, NaN everywhere else."""

    def __init__(
        self, rig: Rig, shape: tuple[int, int, int], query_lens: list[int], context_lens: list[int], block_size: int
    ) -> None:
        self.rig, self.query_lens, self.context_lens, self.block_size = rig, query_lens, context_lens, block_size
        self.heads, self.kv_heads, self.head_dim = shape
        self.spec = GqaSpec(*shape, scale=SCALE, dtype=rig.dtype)
        self.kernel = rig.choose(GQA, self.spec)
        counts = [-(-n // block_size) for n in context_lens]
        num_blocks = sum(counts) + 3
        pool = self.kernel.allocate(2, num_blocks + 1, block_size, rig.device)
        for entry in pool.entries:
            assert len(entry) == num_blocks + 1
            entry.fill_(torch.nan)
        self.cache = pool.layers[1]
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.buffers = StepBuffers.allocate(sum(context_lens), len(counts), max(counts) + 2, num_blocks, rig.device)
        # The histories, written by a step of their own; then the step itself.
        self.history = [self._write([n - q for n, q in zip(context_lens, query_lens, strict=True)])]
        self.step, self.metadata = self._prepare(query_lens, context_lens)
        self.qkv = self._noise(sum(query_lens), seed=1)
        self.q, self.k, self.v = self.kernel.write_qkv(self.qkv.clone(), None, None, self.cache, self.metadata)

    def _noise(self, num_tokens: int, seed: int) -> Tensor:
        return self.rig.noise(num_tokens, (self.heads + 2 * self.kv_heads) * self.head_dim, seed=seed)

    def _write(self, lens: list[int]) -> Tensor:
        qkv = self._noise(sum(lens), seed=2)
        if sum(lens):
            rows = [row for row, n in enumerate(lens) if n]
            _, metadata = self._prepare([lens[row] for row in rows], [lens[row] for row in rows], rows, uniform=False)
            self.kernel.write_qkv(qkv.clone(), None, None, self.cache, metadata)
        return qkv

    def _prepare(
        self, query_lens: list[int], context_lens: list[int], rows: list[int] | None = None, *, uniform: bool = True
    ) -> tuple[Step, object]:
        """As `prepare_step` would fill the buffers."""
        tables = self.tables if rows is None else [self.tables[row] for row in rows]
        num_uniform = sum(n == 1 for n in query_lens) if uniform else 0
        assert not uniform or query_lens[:num_uniform] == [1] * num_uniform
        size, buffers = self.block_size, self.buffers
        positions = [p for q, n in zip(query_lens, context_lens, strict=True) for p in range(n - q, n)]
        owners = [row for row, q in enumerate(query_lens) for _ in range(q)]
        slots = [tables[row][p // size] * size + p % size for row, p in zip(owners, positions, strict=True)]
        buffers.positions[: len(positions)] = torch.tensor(positions)
        buffers.token_slots[: len(slots)] = torch.tensor(slots)
        buffers.context_lens[: len(tables)] = torch.tensor(context_lens)
        for row, table in enumerate(tables):
            buffers.block_tables[row, : len(table)] = torch.tensor(table)
        step = Step(
            num_uniform_rows=num_uniform,
            chunks=tuple(map(Chunk, query_lens[num_uniform:], context_lens[num_uniform:])),
            max_context_len=max(context_lens),
        )
        return step, self.kernel.prepare(step, buffers, size)

    def exact(self) -> Tensor:
        """Causal attention in float64: [T, H × D]."""
        group = self.heads // self.kv_heads
        split = [self.heads, self.kv_heads, self.kv_heads]
        old = self.history[0].double().unflatten(-1, (-1, self.head_dim)).split(split, 1)
        new = self.qkv.double().unflatten(-1, (-1, self.head_dim)).split(split, 1)
        outs, old_at, new_at = [], 0, 0
        for q_len, context_len in zip(self.query_lens, self.context_lens, strict=True):
            before = context_len - q_len
            k, v = (
                torch.cat((old[i][old_at : old_at + before], new[i][new_at : new_at + q_len])).repeat_interleave(
                    group, 1
                )
                for i in (1, 2)
            )
            scores = torch.einsum("qhd,khd->hqk", new[0][new_at : new_at + q_len], k) * SCALE
            hidden = torch.arange(context_len) > torch.arange(before, context_len)[:, None]
            weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            old_at, new_at = old_at + before, new_at + q_len
        return torch.cat(outs).flatten(1)

    def attend(self) -> Tensor:
        return self.kernel.attend(self.q, self.k, self.v, self.cache, self.metadata)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("context_lens", [[1], [17], [20, 20, 20], [1, 40, 16, 33]], ids=str)
def test_attention_of_uniform_rows(
    rig: Rig, shape: tuple[int, int, int], block_size: int, context_lens: list[int]
) -> None:
    rows = Rows(rig, shape, [1] * len(context_lens), context_lens, block_size)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_attention_of_chunks_with_and_without_a_cached_prefix(
    rig: Rig, shape: tuple[int, int, int], block_size: int
) -> None:
    """After one uniform row: no prefix, a prefix, a prefix that ends inside a block."""
    rows = Rows(rig, shape, [1, 9, 16, 5], [8, 9, 48, 30], block_size)
    rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded_rows_equal_exact_ones(rig: Rig, shape: tuple[int, int, int]) -> None:
    """What runs where lengths are device facts, on the CPU, too: one token a row and two, as drafts would be."""
    rows = Rows(rig, shape, [1, 1, 1], [8, 1, 30], 16)
    uniform = rows.kernel._padded_rows(rows.step, rows.buffers, rows.buffers.block_tables[:3, :2], 16)  # type: ignore[attr-defined]
    got = rows.kernel._attend_padded(rows.q, rows.cache, uniform)  # type: ignore[attr-defined]
    rig.assert_close(got.flatten(1), rows.exact())


def test_queries_and_keys_are_normed_and_rotated(rig: Rig) -> None:
    rows = Rows(rig, (4, 2, 16), [1, 9], [8, 9], 16)
    norm = QkNorm(rig.noise(16, seed=5), rig.noise(16, seed=6), 1e-5)
    angles = torch.arange(30)[:, None] * torch.linspace(1, 0.1, 8)
    c, s = angles.cos(), angles.sin()
    rope = RopeTable(*(torch.cat(pair, -1).to(rig.device, rig.dtype) for pair in ((c, c), (-s, s))))
    q, k, v = rows.kernel.write_qkv(rows.qkv.clone(), norm, rope, rows.cache, rows.metadata)
    exact_q, exact_k, exact_v = rows.qkv.double().unflatten(-1, (8, 16)).split([4, 2, 2], 1)
    positions = torch.tensor([7, *range(9)], device=rig.device)
    cos, sin = rope.cos.double()[positions, None, :8], rope.sin.double()[positions, None, 8:]
    for got, plain, weight in ((q, exact_q, norm.q_weight), (k, exact_k, norm.k_weight)):
        normed = plain * (plain.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        first, second = normed.chunk(2, -1)
        rig.assert_close(got, torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    assert torch.equal(v, exact_v.to(rig.dtype))


# --- the runner's own


def test_prepare_reads_positions_and_tokens_of_uniform_rows_from_the_slots(kernels: Kernels) -> None:
    """Slots 2 and 0 decode, slot 1 computes a chunk, the last row is padding."""
    device = kernels.device
    slots = SlotTables(
        tokens=torch.arange(60, dtype=torch.int32, device=device).view(4, 15),
        lengths=torch.tensor([5, 9, 8, 1], device=device),
        block_tables=torch.tensor([[7, 8, 9], [1, 2, 3], [4, 5, 6], [20, 20, 20]], dtype=torch.int32, device=device),
        groups=torch.tensor([0, 1, 2, 3], device=device),
    )
    buffers = StepBuffers.allocate(20, 5, 3, 20, device)
    prepare = kernels.choose(PREPARE_STEP, None, torch.int64)

    rows = StagedRows(*(torch.tensor(values, device=device) for values in ([2, 0, 1], [0, 0, 3], [1, 1, 3])))
    prepare(rows, slots, Step(num_uniform_rows=2, chunks=(Chunk(3, 6),), max_context_len=8), 4, buffers)
    assert buffers.input_ids[:5].tolist() == [37, 4, 18, 19, 20]
    assert buffers.positions[:5].tolist() == [7, 4, 3, 4, 5]
    assert buffers.token_slots[:5].tolist() == [5 * 4 + 3, 8 * 4, 1 * 4 + 3, 2 * 4, 2 * 4 + 1]
    assert buffers.query_starts[:4].tolist() == [0, 1, 2, 5]
    assert buffers.context_lens[:3].tolist() == [8, 5, 6]
    assert buffers.block_tables[:3, :2].tolist() == [[4, 5], [7, 8], [1, 2]]
    assert buffers.groups[:3].tolist() == [2, 0, 1]

    rows = StagedRows(*(torch.tensor(values, device=device) for values in ([2, 3], [0, 0], [1, 1])))
    prepare(rows, slots, Step(num_uniform_rows=2, max_context_len=8, num_padding_rows=1), 4, buffers)
    assert buffers.token_slots[:2].tolist() == [5 * 4 + 3, -1]
    assert buffers.context_lens[:2].tolist() == [8, 0]


def test_moves_of_entries(rig: Rig) -> None:
    move = rig.choose(MOVE_ENTRIES, None)
    cache = rig.noise(3, 6, 4, 2, 8).transpose(0, 1)
    before = cache.clone()
    host = torch.zeros(5, 3, 4, 2, 8, dtype=rig.dtype)
    blocks = torch.tensor([1, 4], device=rig.device)
    move.swap_out(cache, host, blocks, [3, 0])
    move.copy(cache, blocks, torch.tensor([4, 5], device=rig.device))
    move.zero(cache, torch.tensor([0], device=rig.device))
    move.swap_in(cache, host, torch.tensor([2, 3], device=rig.device), [0, 3])
    if rig.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[3], before[1].cpu()) and torch.equal(host[0], before[4].cpu())
    expected = [torch.zeros_like(before[0]), *(before[i] for i in (1, 4, 1, 1, 4))]
    for block, content in enumerate(expected):
        assert torch.equal(cache[block], content), block


def test_random_bits_are_the_same_on_every_device(kernels: Kernels) -> None:
    seeds, positions = torch.tensor([3, -9]), torch.tensor([5, 6])
    here = Kernels(CPU).choose(RANDOM_UNIFORM, None, torch.float64)(seeds, positions, 1, 300)
    there = kernels.choose(RANDOM_UNIFORM, None, torch.float64)(
        seeds.to(kernels.device), positions.to(kernels.device), 1, 300
    )
    assert torch.equal(here, there.cpu())


# --- the choice


def linear_kernel() -> object:
    torch_linear._onednn_works.cache_clear()
    return Kernels(CPU).choose(LINEAR, LinearSpec(8, 8), torch.float32)


def test_wrong_results_of_the_packed_product_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OneDnnLinear.__call__
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x, packed, out=None: right(self, x, packed) * 1.01)
    assert isinstance(linear_kernel(), PlainLinear)


def test_missing_packed_operator_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: OneDnnLinear) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(OneDnnLinear, "__init__", missing)
    assert isinstance(linear_kernel(), PlainLinear)


def test_the_table_says_what_was_chosen() -> None:
    kernels = Kernels(CPU)
    kernels.choose(RMS_NORM, NormSpec(8), torch.float32)
    assert kernels.describe() == {"rms_norm": "torch"}
    assert kernels.choose(RMS_NORM, NormSpec(8), torch.float32) is kernels.choose(RMS_NORM, NormSpec(8), torch.float32)
