"""The whole aiter backend on a real AMD GPU: native kernels, Triton's, graphs, a model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.aiter import checks
from tests.kernels.rig import Rig
from tests.runner.conftest import TINY, random_prompt
from tests.runner.driver import Driver
from worker.kernels.aiter import package
from worker.kernels.select import Kernels
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

pytestmark = [
    pytest.mark.rocm,
    pytest.mark.skipif(
        torch.version.hip is None or not torch.cuda.is_available(), reason="no AMD GPU, or torch is not built for it"
    ),
]

SHAPES = {"assembly": (8, 2, 128), "gluon": (8, 2, 64), "Triton": (4, 2, 32)}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(Kernels(torch.device("cuda"), "aiter"), request.param)


@pytest.fixture
def triton_rig(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """As on a GPU for which AITER has no native kernels."""
    monkeypatch.setattr(package, "NATIVE_ARCHITECTURES", ())
    return rig


OPERATIONS = [checks.rms_norm, checks.add_rms_norm, checks.silu_and_mul, checks.linear]
ROWS = [
    lambda rig, shape: checks.mixed_step(rig, shape),
    lambda rig, shape: checks.uniform_rows(rig, shape, 1),
    lambda rig, shape: checks.uniform_rows(rig, shape, 3),
    lambda rig, shape: checks.norm_and_rope(rig, shape, True, True),
    lambda rig, shape: checks.norm_and_rope(rig, shape, False, True),
    lambda rig, shape: checks.norm_and_rope(rig, shape, True, False),
    checks.what_is_not_a_number_is_not_written,
]


@pytest.mark.parametrize("check", OPERATIONS)
def test_native_operations(rig: Rig, check: Callable[[Rig], None]) -> None:
    check(rig)


@pytest.mark.parametrize("check", OPERATIONS)
def test_triton_operations(triton_rig: Rig, check: Callable[[Rig], None]) -> None:
    check(triton_rig)


@pytest.mark.parametrize("kernel", SHAPES)
@pytest.mark.parametrize("check", ROWS)
def test_attention(rig: Rig, kernel: str, check: Callable[[Rig, checks.Shape], None]) -> None:
    check(rig, SHAPES[kernel])
    assert kernel in rig.kernels.describe()["gqa"]


@pytest.mark.parametrize("check", ROWS)
def test_triton_attention(triton_rig: Rig, check: Callable[[Rig, checks.Shape], None]) -> None:
    check(triton_rig, SHAPES["assembly"])


def test_attention_with_a_window_and_sinks(rig: Rig) -> None:
    checks.mixed_step(rig, SHAPES["assembly"], window=7, has_sinks=True)


@pytest.mark.parametrize("kernel", SHAPES)
def test_a_replayed_graph_equals_eager(rig: Rig, kernel: str) -> None:
    rows = checks.rows_of(rig, SHAPES[kernel], [1, 1], [7, 18], num_padding=1)
    eager = rows.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rows.kernel.attend(rows.q, rows.k, rows.v, rows.cache, rows.metadata)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured[: len(eager)], eager)


@pytest.mark.parametrize("head_dim", [128, 32])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_tokens_of_a_tiny_model_equal_those_of_torchs_kernels(
    tmp_path: Path, head_dim: int, enforce_eager: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(TINY | {"head_dim": head_dim}))
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(tmp_path)
    outputs = {}
    for backend in ("torch", "aiter"):
        runner, info = build_runner(
            RunnerConfig(
                model=str(tmp_path), device="cuda", dtype="float16", kernel_backend=backend, num_blocks=64,
                max_num_seqs=8, enforce_eager=enforce_eager,
            ),
            Group(),
        )  # fmt: skip
        driver = Driver(runner, info.num_blocks, info.block_size)
        seqs = [driver.add(random_prompt(n, n)) for n in (1, 17, 40)]
        driver.prefill(*seqs)
        driver.decode(*seqs, steps=16)
        outputs[backend] = [seq.output for seq in seqs]
    assert outputs["aiter"] == outputs["torch"]
