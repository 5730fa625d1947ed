"""Every call of a native operation, bound against the recorded signatures; see `stand_ins` for what that shows."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kernels.aiter.record_signatures import OPERATIONS, SIGNATURES, read_signatures
from tests.kernels.aiter.stand_ins import SNAPSHOTS, StandIns
from tests.kernels.rig import Rig, Rows
from worker.kernels.aiter import package
from worker.kernels.backends import KernelBackendError
from worker.kernels.interface import (
    GQA,
    LINEAR,
    RMS_NORM,
    SILU_AND_MUL,
    ActivationSpec,
    GqaSpec,
    LinearSpec,
    NormSpec,
    QkNorm,
    RopeTable,
)
from worker.kernels.select import Kernels
from worker.kernels.weights import Dense
from worker.parallel.group import Group

CPU = torch.device("cpu")


@pytest.fixture(params=SNAPSHOTS, ids=lambda snapshot: snapshot.stem)
def stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    made = StandIns(request.param)
    monkeypatch.setattr(package, "operation", made.operation)
    monkeypatch.setattr(package, "architecture", lambda device: "gfx942")
    monkeypatch.setattr(package, "obstacle", lambda device: None)
    return made


@pytest.fixture
def rig(stand_ins: StandIns) -> Rig:
    return Rig(Kernels(CPU, "aiter"), torch.bfloat16)


def test_rms_norm_of_rows_and_of_heads(rig: Rig) -> None:
    kernel, weight = rig.choose(RMS_NORM, NormSpec(64)), rig.noise(64, seed=1)
    for x in (rig.noise(5, 64), rig.noise(5, 3, 64), rig.noise(5, 6, 64)[:, 2:4]):
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        rig.assert_close(kernel.norm(x, weight, 1e-5), exact)


def test_the_residual_is_updated_in_place(rig: Rig) -> None:
    x, residual, weight = rig.noise(5, 64), rig.noise(5, 64, seed=1), rig.noise(64, seed=2)
    total = x.double() + residual.double()
    normed, same = rig.choose(RMS_NORM, NormSpec(64)).add_norm(x, residual, weight, 1e-5, Group())
    assert same.data_ptr() == residual.data_ptr()
    rig.assert_close(residual, total)
    rig.assert_close(normed, total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double())


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_sum_over_ranks_goes_through_aiter(rig: Rig, stand_ins: StandIns, one_rank: dist.ProcessGroup) -> None:
    """The stand-in of the all-reduce doubles."""
    if "0.1.7" not in stand_ins.snapshot.stem:
        pytest.skip("this snapshot has no all-reduce")
    x, residual, weight = rig.noise(5, 64), torch.zeros(5, 64, dtype=rig.dtype), rig.noise(64, seed=2)
    kernel = rig.choose(RMS_NORM, NormSpec(64))
    for _ in range(2):
        kernel.add_norm(x.clone(), residual, weight, 1e-5, Group(0, 2, one_rank))
    rig.assert_close(residual, 4 * x.double())


def test_silu_and_mul(rig: Rig) -> None:
    x = rig.noise(5, 128)
    gate, up = x.double().chunk(2, -1)
    rig.assert_close(rig.choose(SILU_AND_MUL, ActivationSpec(64))(x), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rig: Rig, with_bias: bool) -> None:
    x, weight, bias = rig.noise(3, 96), rig.noise(131, 96, seed=1), rig.noise(131, seed=2) if with_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    linear = rig.choose(LINEAR, LinearSpec(96, 131))
    packed = linear.pack(Dense(weight, bias))
    rig.assert_close(linear(x, packed), exact)
    out = torch.empty(3, 131, dtype=rig.dtype)
    assert linear(x, packed, out).data_ptr() == out.data_ptr()
    rig.assert_close(out, exact)


SHAPES = {"assembly": (8, 2, 128), "gluon": (8, 2, 64)}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, rig: Rig) -> tuple[int, int, int]:
    """One that the kernel of that name serves."""
    rig.choose(GQA, GqaSpec(*SHAPES[request.param], SHAPES[request.param][2] ** -0.5, rig.dtype))
    if request.param not in rig.kernels.describe()["gqa"]:
        pytest.skip(f"this release has no {request.param} attention")
    return SHAPES[request.param]


def rows_of(rig: Rig, shape: tuple[int, int, int], query_lens: list[int], context_lens: list[int], **more: int) -> Rows:
    return Rows(rig, shape, query_lens, context_lens, 16, scale=shape[2] ** -0.5, **more)


def test_attention_of_uniform_rows_and_padding(rig: Rig, shape: tuple[int, int, int]) -> None:
    rows = rows_of(rig, shape, [1, 1, 1], [17, 1, 48], num_padding=2)
    rig.assert_close(rows.attend(), rows.exact())


def test_attention_of_rows_of_several_tokens(rig: Rig, shape: tuple[int, int, int]) -> None:
    rows = rows_of(rig, shape, [3, 3], [20, 33], uniform_len=3, num_padding=1)
    rig.assert_close(rows.attend(), rows.exact())


def test_attention_of_chunks(rig: Rig, shape: tuple[int, int, int]) -> None:
    """Without a prefix they are read as they are; with one anywhere, all contexts are gathered."""
    for query_lens, context_lens in (([1, 9, 4], [8, 9, 4]), ([9, 16, 5], [9, 48, 30])):
        rows = rows_of(rig, shape, query_lens, context_lens)
        rig.assert_close(rows.attend(), rows.exact())


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_queries_and_keys_are_normed_rotated_and_written(
    rig: Rig, stand_ins: StandIns, shape: tuple[int, int, int], with_norm: bool, with_rope: bool
) -> None:
    rows, dim = rows_of(rig, shape, [1, 5], [8, 5]), shape[2]
    norm = QkNorm(rig.noise(dim, seed=5), rig.noise(dim, seed=6), 1e-5) if with_norm else None
    angles = torch.arange(10)[:, None] * torch.linspace(1, 0.1, dim // 2)
    c, s = angles.cos(), angles.sin()
    rope = RopeTable(*(torch.cat(pair, -1).to(rig.dtype) for pair in ((c, c), (-s, s)))) if with_rope else None
    arguments = rows.qkv.clone(), norm, rope
    q, k, v = rows.kernel.write_qkv(*arguments, rows.cache, rows.metadata)
    torch_kernel = Kernels(CPU, "torch").choose(GQA, rows.spec, rig.dtype)
    pool = torch_kernel.allocate(1, rows.buffers.spare_block + 1, 16, CPU)
    exact = torch_kernel.write_qkv(
        rows.qkv.clone(), norm, rope, pool.layers[0], torch_kernel.prepare(rows.step, rows.buffers, 16)
    )
    for got, expected in zip((q, k, v), exact, strict=True):
        rig.assert_close(got.contiguous(), expected.double())
    is_fused = "aiter.fused_qk_norm_rope_cache_quant_shuffle" in stand_ins.called
    assert is_fused == (with_norm and with_rope and "0.1.7" not in stand_ins.snapshot.stem)
    # The cache has them in packets of 8.
    block, offset = divmod(int(rows.buffers.token_slots[0]), 16)
    assert torch.equal(rows.cache.k[block, :, :, offset].flatten(1), k[0])
    assert torch.equal(rows.cache.v[block, :, offset // 8, :, offset % 8], v[0])


def test_what_is_not_a_number_is_not_written(rig: Rig, shape: tuple[int, int, int]) -> None:
    rows = rows_of(rig, shape, [1], [1])
    rows.kernel.write_qkv(torch.full_like(rows.qkv, torch.nan), None, None, rows.cache, rows.metadata)
    block, offset = divmod(int(rows.buffers.token_slots[0]), 16)
    assert rows.cache.v[block, :, offset // 8, :, offset % 8].isfinite().all()


def test_blocks_of_another_size_are_refused(rig: Rig, shape: tuple[int, int, int]) -> None:
    kernel = rig.choose(GQA, GqaSpec(*shape, shape[2] ** -0.5, rig.dtype))
    with pytest.raises(KernelBackendError, match="--block-size"):
        kernel.allocate(1, 3, 48, CPU)


def test_drafts_for_too_many_heads_are_refused(rig: Rig) -> None:
    with pytest.raises(KernelBackendError, match="at most 8 query heads"):
        rows_of(rig, (16, 1, 128), [3], [20], uniform_len=3)


# --- the choice


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "aiter assembly"),
        ({"head_dim": 64, "scale": 64**-0.5}, "aiter gluon"),
        ({"scale": 0.3}, "aiter gluon"),
        ({"window": 8}, "torch"),
        ({"has_sinks": True}, "torch"),
        ({"head_dim": 80}, "torch"),
    ],
)
def test_attention_by_shape(rig: Rig, stand_ins: StandIns, changes: dict[str, object], kernel: str) -> None:
    """What the native kernels leave goes to Triton's, which have no stand-in here, and then to torch."""
    spec = replace(GqaSpec(8, 2, 128, 128**-0.5, rig.dtype), **changes)  # type: ignore[arg-type]
    rig.choose(GQA, spec)
    if kernel == "aiter gluon" and "0.1.7" in stand_ins.snapshot.stem:
        kernel = "torch"
    assert rig.kernels.describe()["gqa"] == kernel


def test_native_kernels_are_for_their_architectures_and_dtypes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, architecture, expected in (
        (torch.float32, "gfx942", "torch"), (torch.bfloat16, "gfx1100", "torch"), (torch.float16, "gfx950", "aiter"),
    ):  # fmt: skip
        monkeypatch.setattr(package, "architecture", lambda device, name=architecture: name)
        kernels = Kernels(CPU, "aiter")
        kernels.choose(SILU_AND_MUL, ActivationSpec(64), dtype)
        assert kernels.describe()["silu_and_mul"] == expected


# --- the record


def test_every_recorded_operation_has_a_stand_in_and_a_signature() -> None:
    recorded = {operation for snapshot in SNAPSHOTS for operation in json.loads(snapshot.read_text())}
    assert recorded == set(OPERATIONS)


def test_the_record_is_what_the_installed_release_says() -> None:
    try:
        release = version("amd-aiter")
    except PackageNotFoundError:
        pytest.skip("amd-aiter is not installed: make kernels")
    found = find_spec("aiter")
    assert found is not None and found.origin is not None
    recorded = json.loads((SIGNATURES / f"amd-aiter-{release}.json").read_text())
    assert read_signatures(Path(found.origin).parent) == recorded
