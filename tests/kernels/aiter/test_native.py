"""Every call of a native operation, bound against the recorded signatures; see `stand_ins` for what that shows."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kernels.aiter import checks
from tests.kernels.aiter.record_signatures import OPERATIONS, SIGNATURES, read_signatures
from tests.kernels.aiter.stand_ins import SNAPSHOTS, StandIns
from tests.kernels.rig import Rig
from worker.kernels.aiter import package
from worker.kernels.elementwise import RMS_NORM, NormSpec
from worker.kernels.gqa import GQA, GqaSpec
from worker.kernels.operation import KernelBackendError
from worker.kernels.select import Kernels
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


@pytest.mark.parametrize("check", [checks.rms_norm, checks.add_rms_norm, checks.silu_and_mul, checks.linear])
def test_operations(rig: Rig, check: Callable[[Rig], None]) -> None:
    check(rig)
    assert set(rig.kernels.describe().values()) <= {"aiter", "aiter tuned"}


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_sum_over_ranks_is_aiters_where_it_has_one(
    rig: Rig, stand_ins: StandIns, one_rank: dist.ProcessGroup
) -> None:
    """The stand-in of the all-reduce doubles; the group's own, of one rank, does nothing."""
    x, residual, weight = rig.noise(5, 64), torch.zeros(5, 64, dtype=rig.dtype), rig.noise(64, seed=2)
    kernel = rig.choose(RMS_NORM, NormSpec(64))
    for _ in range(2):
        kernel.add_norm(x.clone(), residual, weight, 1e-5, Group(0, 2, one_rank))
    rig.assert_close(residual, (4 if "0.1.7" in stand_ins.snapshot.stem else 2) * x.double())


SHAPES = {"assembly": (8, 2, 128), "gluon": (8, 2, 64)}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, rig: Rig) -> checks.Shape:
    """One that the kernel of that name serves."""
    rig.choose(GQA, GqaSpec(*SHAPES[request.param], SHAPES[request.param][2] ** -0.5, rig.dtype))
    if request.param not in rig.kernels.describe()["gqa"]:
        pytest.skip(f"this release has no {request.param} attention")
    return SHAPES[request.param]


def test_attention_of_a_mixed_step(rig: Rig, shape: checks.Shape) -> None:
    checks.mixed_step(rig, shape)


@pytest.mark.parametrize("uniform_len", [1, 3])
def test_attention_of_uniform_rows_and_padding(rig: Rig, shape: checks.Shape, uniform_len: int) -> None:
    checks.uniform_rows(rig, shape, uniform_len)


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_queries_and_keys_are_normed_rotated_and_written(
    rig: Rig, stand_ins: StandIns, shape: checks.Shape, with_norm: bool, with_rope: bool
) -> None:
    rows = checks.norm_and_rope(rig, shape, with_norm, with_rope)
    is_fused = "aiter.fused_qk_norm_rope_cache_quant_shuffle" in stand_ins.called
    assert is_fused == (with_norm and with_rope and "0.1.7" not in stand_ins.snapshot.stem)
    # The cache has them in packets of 8.
    block, offset = divmod(int(rows.buffers.token_slots[0]), 16)
    assert torch.equal(rows.cache.k[block, :, :, offset].flatten(1), rows.k[0])
    assert torch.equal(rows.cache.v[block, :, offset // 8, :, offset % 8], rows.v[0])


def test_a_fused_write_of_another_form_is_left_alone(
    rig: Rig, stand_ins: StandIns, shape: checks.Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in releases between the two."""

    def compiled(*args: object, **kwargs: object) -> None:
        raise AssertionError("it takes q, k and v as one")

    def operation(module: str, name: str) -> object:
        return compiled if "fused_qk_norm" in name else stand_ins.operation(module, name)

    monkeypatch.setattr(package, "operation", operation)
    checks.norm_and_rope(Rig(Kernels(CPU, "aiter"), rig.dtype), shape, True, True)


def test_what_is_not_a_number_is_not_written(rig: Rig, shape: checks.Shape) -> None:
    checks.what_is_not_a_number_is_not_written(rig, shape)


def test_uniform_rows_are_views_of_the_buffers(rig: Rig, shape: checks.Shape) -> None:
    checks.uniform_rows_are_views_of_the_buffers(rig, shape)


def test_blocks_of_another_size_are_refused(rig: Rig, shape: checks.Shape) -> None:
    kernel = rig.choose(GQA, GqaSpec(*shape, shape[2] ** -0.5, rig.dtype))
    with pytest.raises(KernelBackendError, match="--block-size"):
        kernel.allocate(1, 3, 48, CPU)


def test_drafts_for_too_many_heads_are_refused(rig: Rig) -> None:
    with pytest.raises(KernelBackendError, match="at most 8 query heads"):
        checks.rows_of(rig, (16, 1, 128), [3], [20], uniform_len=3)


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
        kernels.choose(RMS_NORM, NormSpec(64), dtype)
        assert kernels.describe()["rms_norm"] == expected


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
