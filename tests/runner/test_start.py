"""What a start brings into memory, counted in modules and bytes."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from worker.kernels.native.library import obstacle
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig

MIB = 1 << 20
SCRIPT = "import sys, {}; print(*[name for name in sys.modules if '.' not in name]); sys.stdout.flush(); input()"
"""Imports a module, says what it has, and waits."""


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("worker.__main__", {"asyncio", "pydantic", "grpc", "numpy"}),
        ("worker.start", {"torch", "numpy", "jinja2", "prometheus_client"}),
        ("worker.runner.process", {"torch", "numpy", "grpc", "pydantic"}),
        ("worker.server", {"torch", "numpy", "gguf", "transformers", "opentelemetry"}),
        ("worker.loader.gguf.tokenizer", {"torch", "numpy", "gguf", "yaml"}),
        ("worker.loader.gguf.checkpoint", {"gguf", "yaml"}),
        ("worker.runner.rank", {"grpc", "pydantic", "tokenizers", "transformers", "triton", "aiter"}),
    ],
)
def test_what_is_not_used_is_not_imported(module: str, unwanted: set[str]) -> None:
    packages, _ = imported(module)
    assert not unwanted & packages


@pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
def test_a_rank_holds_its_weights_once_and_gives_back_what_they_were_read_into() -> None:
    """Of a GGUF file whose weights take 84 MiB as they are stored. Blocks and a few buffers come on top of them."""
    config = RunnerConfig(model="smollm2", max_model_len=256, max_num_seqs=4, num_threads=2, kv_cache_gib=0.05)
    with LocalEngine(config):
        (rank,) = psutil.Process().children()
        num_bytes = anonymous_bytes(rank.pid)
    _, before = imported("worker.runner.rank")
    assert 84 * MIB < num_bytes - before < 1.5 * 84 * MIB


def imported(module: str) -> tuple[set[str], int]:
    """What a process has that has imported it: packages, and bytes of memory."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(module)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        packages = set(process.stdout.readline().split())
        num_bytes = anonymous_bytes(process.pid)
        process.communicate("\n")
    return packages, num_bytes


def anonymous_bytes(pid: int) -> int:
    """Of its memory, what is in no file."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Anonymous: +(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
