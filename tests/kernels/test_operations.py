"""Each operation of the kernel table but attention against a float64 reference."""

import pytest
import torch

from tests.kernels.rig import Rig
from worker.kernels.elementwise import EMBEDDING, GATED_ACTIVATION, RMS_NORM, ActivationSpec, EmbeddingSpec, NormSpec
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.move import MOVE_ENTRIES
from worker.kernels.prepare import PREPARE_STEP, REMEMBER
from worker.kernels.select import Kernels
from worker.kernels.step import Chunk, SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.torch.random import random_uniform
from worker.kernels.weights import Dense
from worker.parallel.group import Group


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


def test_gated_activations(rig: Rig) -> None:
    x = rig.noise(5, 128)
    gate, up = x.double().chunk(2, -1)
    rig.assert_close(rig.choose(GATED_ACTIVATION, ActivationSpec(64))(x.clone()), gate * gate.sigmoid() * up)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    rig.assert_close(rig.choose(GATED_ACTIVATION, ActivationSpec(64, "gelu_tanh"))(x.clone()), exact)


def test_a_norm_with_a_float32_weight(rig: Rig) -> None:
    """Which is not rounded to the dtype of what it norms."""
    x, weight = rig.noise(3, 96), 1 + 1e-4 * torch.arange(96, dtype=torch.float32, device=rig.device)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    kernel = rig.choose(RMS_NORM, NormSpec(96, has_float32_weight=True))
    rig.assert_close(kernel.norm(x, weight, 1e-5), exact)
    normed, _ = kernel.add_norm(x.clone(), torch.zeros_like(x), weight, 1e-5, Group())
    rig.assert_close(normed, exact)


def test_embedding(rig: Rig) -> None:
    table = rig.noise(50, 8)
    ids = torch.tensor([3, 49, 0, 3], device=rig.device)
    embed = rig.choose(EMBEDDING, EmbeddingSpec(8))
    assert torch.equal(embed(ids, table), table[ids])
    shard = torch.where((ids >= 3)[:, None] & (ids < 13)[:, None], table[ids], 0)
    assert torch.equal(embed(ids, table[3:13], 3), shard)
    residual = torch.full_like(shard, torch.nan)
    assert torch.equal(embed(ids, table, None, residual), table[ids])
    assert torch.equal(residual, torch.zeros_like(shard))


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


def test_linear_of_one_row_of_many_features(rig: Rig) -> None:
    """More than a program holds; not a multiple of a piece."""
    x, weight = rig.noise(1, 3200), rig.noise(5, 3200, seed=1)
    linear = rig.choose(LINEAR, LinearSpec(3200, 5))
    rig.assert_close(linear(x, linear.pack(Dense(weight, None))), x.double() @ weight.double().T)


@pytest.mark.parametrize("rows", [1, 3, 40, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_linear(rig: Rig, rows: int, with_bias: bool) -> None:
    x, weight = rig.noise(rows, 96), rig.noise(134, 96, seed=1)
    bias = rig.noise(134, seed=2) if with_bias else None
    linear = rig.choose(LINEAR, LinearSpec(96, 134))
    gated = linear.gated(x, linear.pack(Dense(weight, bias)))
    if gated is None:
        return  # the layer does it in two
    gate, up = (x.double() @ weight.double().T + (bias.double() if bias is not None else 0)).chunk(2, -1)
    rig.assert_close(gated, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("size", "num_outputs"), [(1104, 20), (1024, 134), (96, 20), (592, 70)])
def test_linear_of_a_norm(rig: Rig, is_gated: bool, with_bias: bool, size: int, num_outputs: int) -> None:
    """Of one row; with a norm that is a warp's and a program's, pieces that fill it and that do not."""
    x, residual, norm_weight = rig.noise(1, size), rig.noise(1, size, seed=3), rig.noise(size, seed=4)
    weight, bias = rig.noise(num_outputs, size, seed=1), rig.noise(num_outputs, seed=2) if with_bias else None
    linear = rig.choose(LINEAR, LinearSpec(size, num_outputs))
    found = linear.of_norm(x, residual, norm_weight, 1e-6, linear.pack(Dense(weight, bias)), is_gated=is_gated)
    if found is None:
        return  # the layer does it in two
    total = (x.double() + residual.double()).to(rig.dtype)
    assert torch.equal(found[1], total)
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
    exact = exact @ weight.double().T + (bias.double() if bias is not None else 0)
    if is_gated:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    rig.assert_close(found[0], exact)


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
    assert buffers.context_lens[:3].tolist() == buffers.next_positions[:3].tolist() == [8, 5, 6]
    assert buffers.block_tables[:3, :2].tolist() == [[4, 5], [7, 8], [1, 2]]
    assert buffers.groups[:3].tolist() == [2, 0, 1]

    rows = StagedRows(*(torch.tensor(values, device=device) for values in ([2, 3], [0, 0], [1, 1])))
    prepare(rows, slots, Step(num_uniform_rows=2, max_context_len=8, num_padding_rows=1), 4, buffers)
    assert buffers.token_slots[:2].tolist() == [5 * 4 + 3, -1]
    assert buffers.context_lens[:2].tolist() == buffers.next_positions[:2].tolist() == [8, 0]


def test_tokens_are_remembered_by_their_slots(kernels: Kernels) -> None:
    device = kernels.device
    tokens, lengths = torch.full((4, 9), 5, dtype=torch.int32, device=device), torch.tensor([3, 3, 3, 1], device=device)
    none = torch.empty(0, device=device)
    remember = kernels.choose(REMEMBER, None, torch.int64)
    rows, positions, new = (torch.tensor(values, device=device) for values in ([2, 0], [3, 8], [70_000, -2]))
    remember(SlotTables(tokens, lengths, none, none), rows, positions, new)
    expected = torch.full((4, 9), 5, dtype=torch.int32)
    expected[2, 3], expected[0, 8] = 70_000, 0
    assert torch.equal(tokens.cpu(), expected) and lengths.tolist() == [9, 3, 4, 1]


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
    here = random_uniform(seeds, positions, 1, 300)
    there = random_uniform(seeds.to(kernels.device), positions.to(kernels.device), 1, 300)
    assert torch.equal(here, there.cpu())
