"""Each operation of the kernel interface against a float64 reference. A new backend joins by its name in BACKENDS."""

import pytest
import torch
from torch import Tensor

from worker.kernels.interface import AttentionShape, AttentionStep, KernelBackend
from worker.kernels.registry import create_backend
from worker.kernels.torch import linear as linear_module
from worker.kernels.torch.linear import OneDnnLinear, PlainLinear, choose_linear

CPU = torch.device("cpu")
BACKENDS = [("torch", "cpu")] + ([("torch", "cuda")] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=BACKENDS, ids="-".join)
def device_and_name(request: pytest.FixtureRequest) -> tuple[str, torch.device]:
    name, device = request.param
    return name, torch.device(device)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest, device_and_name: tuple[str, torch.device]) -> KernelBackend:
    name, device = device_and_name
    return create_backend(name, device, request.param)


def noise(kernels: KernelBackend, *shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(kernels.device, kernels.dtype)


def assert_close(got: Tensor, expected: Tensor, kernels: KernelBackend) -> None:
    """Error relative to the largest expected value."""
    assert got.shape == expected.shape and got.dtype == kernels.dtype
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[kernels.dtype]


@pytest.mark.parametrize("tokens", [1, 7])
def test_rms_norm(kernels: KernelBackend, tokens: int) -> None:
    x, weight = noise(kernels, tokens, 96), noise(kernels, 96, seed=1)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_close(kernels.rms_norm(x, weight, 1e-5), exact, kernels)


def test_add_rms_norm_updates_the_residual_in_place(kernels: KernelBackend) -> None:
    x, residual, weight = noise(kernels, 5, 96), noise(kernels, 5, 96, seed=1), noise(kernels, 96, seed=2)
    total = x.double() + residual.double()
    normed, same = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert same.data_ptr() == residual.data_ptr()
    assert_close(residual, total, kernels)
    exact = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert_close(normed, exact, kernels)


def test_silu_and_mul(kernels: KernelBackend) -> None:
    x = noise(kernels, 5, 128)
    gate, up = x.double().chunk(2, -1)
    exact = gate * gate.sigmoid() * up
    assert_close(kernels.silu_and_mul(x), exact, kernels)


def test_embedding(kernels: KernelBackend) -> None:
    table = noise(kernels, 50, 8)
    ids = torch.tensor([3, 49, 0, 3], device=kernels.device)
    assert torch.equal(kernels.embedding(ids, table), table[ids])


def test_rotary(kernels: KernelBackend) -> None:
    """Reads a strided view: queries and keys are a part of the merged projection."""
    x = noise(kernels, 5, 6, 16)[:, :4]
    angles = torch.arange(5, device=kernels.device)[:, None] * torch.linspace(1, 0.1, 8, device=kernels.device)
    c, s = angles.cos(), angles.sin()
    cos = torch.cat((c, c), -1)[:, None].to(kernels.dtype)
    sin = torch.cat((-s, s), -1)[:, None].to(kernels.dtype)
    first, second = x.double().chunk(2, -1)
    c, s = c[:, None].double(), s[:, None].double()
    exact = torch.cat((first * c - second * s, second * c + first * s), -1)
    assert_close(kernels.rotary(x, cos, sin), exact, kernels)


@pytest.mark.parametrize("rows", [1, 3, 32, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(kernels: KernelBackend, rows: int, with_bias: bool) -> None:
    x, weight = noise(kernels, rows, 96), noise(kernels, 131, 96, seed=1)
    bias = noise(kernels, 131, seed=2) if with_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert_close(kernels.linear(x, kernels.pack_linear(weight, bias)), exact, kernels)


SHAPES = [AttentionShape(6, 2, 16), AttentionShape(4, 4, 8), AttentionShape(3, 1, 64)]


class Cache:
    """Random K and V of some rows, scattered over blocks; everything else is NaN."""

    def __init__(self, kernels: KernelBackend, shape: AttentionShape, context_lens: list[int], block_size: int) -> None:
        counts = [-(-n // block_size) for n in context_lens]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(4)).tolist()
        self.shape, self.block_size, self.context_lens = shape, block_size, context_lens
        sizes = (len(order), block_size, shape.num_kv_heads, shape.head_dim)
        self.k = torch.full(sizes, torch.nan, dtype=kernels.dtype, device=kernels.device)
        self.v = self.k.clone()
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        self.rows: list[tuple[Tensor, Tensor]] = []
        for row, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[row, :count] = torch.tensor(blocks)
            slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(length)])
            k, v = (noise(kernels, length, shape.num_kv_heads, shape.head_dim, seed=2 * row + i) for i in (10, 11))
            kernels.write_kv(k, v, self.k, self.v, slots.to(kernels.device))
            self.rows.append((k, v))
        self.tables = self.tables.to(kernels.device)

    def step(self, query_lens: list[int], num_decode_rows: int) -> AttentionStep:
        return AttentionStep(query_lens, self.context_lens, num_decode_rows, self.tables, self.block_size)

    def exact(self, row: int, q: Tensor, scale: float) -> Tensor:
        """Causal attention of the last len(q) positions of a row, in float64."""
        k, v = (
            t.double().repeat_interleave(self.shape.num_heads // self.shape.num_kv_heads, 1) for t in self.rows[row]
        )
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
        last = torch.arange(len(k) - len(q), len(k), device=q.device)
        hidden = torch.arange(len(k), device=q.device) > last[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("context_lens", [[1], [17], [20, 20, 20], [1, 40, 16, 33]], ids=str)
def test_attention_decode(
    kernels: KernelBackend, shape: AttentionShape, block_size: int, context_lens: list[int]
) -> None:
    cache = Cache(kernels, shape, context_lens, block_size)
    q = noise(kernels, len(context_lens), shape.num_heads, shape.head_dim)
    plan = kernels.plan_attention(cache.step([1] * len(context_lens), len(context_lens)), shape)
    got = kernels.attention_decode(q, cache.k, cache.v, plan, 0.3)
    exact = torch.cat([cache.exact(row, q[row : row + 1], 0.3) for row in range(len(context_lens))])
    assert_close(got, exact, kernels)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_attention_prefill_with_and_without_a_cached_prefix(
    kernels: KernelBackend, shape: AttentionShape, block_size: int
) -> None:
    """After one decode row: no prefix, a prefix, a prefix that ends inside a block."""
    query_lens, context_lens = [1, 9, 16, 5], [8, 9, 48, 30]
    cache = Cache(kernels, shape, context_lens, block_size)
    plan = kernels.plan_attention(cache.step(query_lens, 1), shape)
    q = noise(kernels, sum(query_lens[1:]), shape.num_heads, shape.head_dim)
    got = kernels.attention_prefill(q, cache.k, cache.v, plan, 0.3)
    parts = q.split(query_lens[1:])
    exact = torch.cat([cache.exact(row, part, 0.3) for row, part in enumerate(parts, start=1)])
    assert_close(got, exact, kernels)


def test_block_operations(kernels: KernelBackend) -> None:
    cache = noise(kernels, 3, 6, 4, 2, 8)
    before = cache.clone()
    host = torch.zeros(5, 3, 4, 2, 8, dtype=kernels.dtype)
    blocks = torch.tensor([1, 4], device=kernels.device)
    kernels.swap_out(cache, host, blocks, [3, 0])
    kernels.copy_blocks(cache, blocks, torch.tensor([4, 5], device=kernels.device))
    kernels.zero_blocks(cache, torch.tensor([0], device=kernels.device))
    kernels.swap_in(cache, host, torch.tensor([2, 3], device=kernels.device), [0, 3])
    if kernels.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[3], before[:, 1].cpu()) and torch.equal(host[0], before[:, 4].cpu())
    expected = [torch.zeros_like(before[:, 0]), *(before[:, i] for i in (1, 4, 1, 1, 4))]
    for block, content in enumerate(expected):
        assert torch.equal(cache[:, block], content), block


def test_random_bits_are_the_same_on_every_device(kernels: KernelBackend) -> None:
    seeds, positions = torch.tensor([3, -9]), torch.tensor([5, 6])
    here = create_backend("torch", CPU, torch.float32).random_uniform(seeds, positions, 1, 300)
    there = kernels.random_uniform(seeds.to(kernels.device), positions.to(kernels.device), 1, 300)
    assert torch.equal(here, there.cpu())


# --- the choice of the linear method


def test_wrong_results_of_the_packed_product_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OneDnnLinear.apply
    monkeypatch.setattr(OneDnnLinear, "apply", lambda self, x, packed: right(self, x, packed) * 1.01)
    assert isinstance(choose_linear(CPU, torch.float32), PlainLinear)


def test_missing_packed_operator_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: OneDnnLinear) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(OneDnnLinear, "__init__", missing)
    assert isinstance(choose_linear(CPU, torch.float32), PlainLinear)


@pytest.mark.parametrize(("plain", "packed", "chosen"), [(1.0, 2.0, PlainLinear), (2.0, 1.0, OneDnnLinear)])
def test_the_faster_method_wins(monkeypatch: pytest.MonkeyPatch, plain: float, packed: float, chosen: type) -> None:
    seconds = {PlainLinear: plain, OneDnnLinear: packed}
    monkeypatch.setattr(linear_module, "_seconds", lambda method, weight, x: seconds[type(method)])
    assert isinstance(choose_linear(CPU, torch.float32), chosen)
