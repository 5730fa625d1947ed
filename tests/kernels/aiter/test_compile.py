"""What the aiter backend launches of Triton's compiles for AMD's GPUs, in bf16."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

IS_THERE = find_spec("triton") is not None and find_spec("aiter") is not None


@pytest.mark.skipif(not IS_THERE, reason="triton or amd-aiter is not installed: make kernels")
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_compiles(architecture: str, tmp_path: Path) -> None:
    """In a process of its own: one that interprets kernels cannot compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aiter.compile", architecture],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert min(sizes.values()) > 0
    assert set(sizes) == {
        "_bound_kernel",
        "_chunk_kernel",
        "_collect_kernel",
        "_copy_kernel",
        "_embedding_kernel",
        "_fused_add_rmsnorm_kernel",
        "_fused_qk_rope_reshape_and_cache_kernel",
        "_gemm_a16_w16_kernel",
        "_kept_kernel",
        "_limit_kernel",
        "_logprobs_kernel",
        "_pick_kernel",
        "_prepare_kernel",
        "_rank_kernel",
        "_rms_norm_kernel",
        "_gated_activation_kernel",
        "kernel_unified_attention_2d",
        "kernel_unified_attention_3d",
        "narrow_kernel",
        "reduce_segments",
    }
