"""A dtype that the processor has to emulate is said to be."""

import logging

import pytest
import torch

from tests.runner.conftest import save_llama
from worker.parallel.group import Group
from worker.runner import build
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.dtypes import is_emulated

AVX2 = frozenset({"avx2", "fma", "f16c"})


@pytest.mark.parametrize(
    ("dtype", "flags", "emulated"),
    [
        (torch.float32, AVX2, False),
        (torch.bfloat16, AVX2, True),
        (torch.float16, AVX2, True),
        (torch.bfloat16, AVX2 | {"avx512f", "avx512_bf16"}, False),
        (torch.bfloat16, AVX2 | {"amx_bf16"}, False),
        (torch.float16, AVX2 | {"avx512_bf16"}, True),
        (torch.float16, AVX2 | {"avx512_fp16"}, False),
        (torch.bfloat16, frozenset(), False),
    ],
)
def test_what_is_emulated(dtype, flags, emulated):
    assert is_emulated(dtype, flags) == emulated


@pytest.mark.parametrize(("dtype", "num_warnings"), [("auto", 0), ("float32", 0), ("bfloat16", 1)])
def test_a_start_says_so(dtype, num_warnings, tmp_path, caplog, monkeypatch):
    save_llama(tmp_path)
    monkeypatch.setattr(build, "this_cpu", lambda: AVX2)
    with caplog.at_level(logging.WARNING):
        build_runner(RunnerConfig(model=str(tmp_path), device="cpu", dtype=dtype, max_model_len=64), Group())
    said = [record.getMessage() for record in caplog.records if "emulated" in record.getMessage()]
    assert said == ["bfloat16 is emulated on this processor: float32 is several times as fast"] * num_warnings
