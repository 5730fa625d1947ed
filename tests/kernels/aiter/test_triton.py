"""AITER's Triton operations through the interpreter, in fp16, against float64; and a whole tiny model through them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.kernels.aiter import checks
from tests.kernels.rig import CPU, Rig
from tests.runner.conftest import TINY, greedy_reference, random_prompt
from tests.runner.driver import Driver
from worker.kernels.gqa import GQA, GqaSpec
from worker.kernels.operation import KernelBackendError
from worker.kernels.select import Kernels
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None or find_spec("aiter") is None:
    pytest.skip("Triton's interpreter is off, or triton or amd-aiter not there: make kernels", allow_module_level=True)

from tests.kernels.aiter.shim import on_cpu

SHAPE = (4, 2, 16)


@pytest.fixture(autouse=True, scope="module")
def machine() -> Iterator[None]:
    with on_cpu("gfx950"):
        yield


@pytest.fixture
def rig() -> Rig:
    return Rig(Kernels(CPU, "aiter"), torch.float16)


@pytest.mark.parametrize("check", [checks.rms_norm, checks.add_rms_norm, checks.linear])
def test_operations(rig: Rig, check: Callable[[Rig], None]) -> None:
    check(rig)
    assert set(rig.kernels.describe().values()) == {"aiter Triton"}


def test_attention_of_a_mixed_step(rig: Rig) -> None:
    checks.mixed_step(rig, SHAPE)
    assert rig.kernels.describe() == {"gqa": "aiter Triton"}


@pytest.mark.parametrize("uniform_len", [1, 3])
def test_attention_of_uniform_rows_and_padding(rig: Rig, uniform_len: int) -> None:
    checks.uniform_rows(rig, SHAPE, uniform_len)


def test_attention_over_contexts_in_parts(rig: Rig) -> None:
    """Few rows that may be longer than 512 tokens: a context is cut into parts, and their results are put together."""
    rows = checks.rows_of(rig, SHAPE, [1, 1], [37, 5])
    rows.metadata = rows.kernel.prepare(replace(rows.step, max_context_len=600), rows.buffers, 16)
    rig.assert_close(rows.attend(), rows.exact())


def test_attention_with_a_window_and_sinks(rig: Rig) -> None:
    checks.mixed_step(rig, (3, 1, 32), window=7, has_sinks=True)


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_rope", [True, False])
def test_queries_and_keys_are_normed_and_rotated(rig: Rig, with_norm: bool, with_rope: bool) -> None:
    checks.norm_and_rope(rig, SHAPE, with_norm, with_rope)


def test_what_is_not_a_number_is_not_written(rig: Rig) -> None:
    checks.what_is_not_a_number_is_not_written(rig, (2, 1, 16))


def test_uniform_rows_are_views_of_the_buffers(rig: Rig) -> None:
    checks.uniform_rows_are_views_of_the_buffers(rig, (2, 1, 16))


@pytest.mark.parametrize("block_size", [8, 48])
def test_blocks_that_do_not_fit_a_tile_are_refused(rig: Rig, block_size: int) -> None:
    kernel = rig.choose(GQA, GqaSpec(*SHAPE, 1.0, rig.dtype))
    with pytest.raises(KernelBackendError, match="--block-size"):
        kernel.allocate(1, 3, block_size, CPU)


def test_a_tiny_model_whole(tmp_path: Path) -> None:
    """Tokens of a random Qwen3 in fp16 equal those of transformers in float32."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**(TINY | shape))).float().eval()
    model.save_pretrained(tmp_path)
    config = RunnerConfig(
        model=str(tmp_path), device="cpu", dtype="float16", kernel_backend="aiter", num_blocks=16, max_num_seqs=4,
        max_model_len=64,
    )  # fmt: skip
    runner, info = build_runner(config, Group())
    for names, carried_out in (
        (("rms_norm", "linear", "gqa"), "aiter Triton"),
        (("gated_activation", "embedding", "prepare_step"), "triton"),
    ):
        assert {info.kernels[name] for name in names} == {carried_out}
    driver = Driver(runner, info.num_blocks, info.block_size)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 17)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=3)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 4)
