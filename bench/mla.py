"""Decode steps of multi-head latent attention over a paged cache, beside a copy of memory."""

from collections.abc import Sequence
from functools import partial

import torch

from bench.common import finish, parse_arguments
from bench.kernel_rig import BLOCK_SIZE, QWEN3_8B, TINY, Bench
from worker.kernels.mla import MLA, MlaSpec
from worker.kernels.step import Step, StepBuffers

HEADS = (16, 128)
"""Of DeepSeek-V3 on one of eight ranks, and whole."""
LOADS = ((1, 8192), (16, 4096), (64, 1024), (64, 4096), (256, 1024))
"""(rows, context)"""
SMALL = ((2, 40),)


def deepseek(num_heads: int, dtype: torch.dtype) -> MlaSpec:
    return MlaSpec(
        num_heads, latent_dim=512, rope_dim=64, nope_dim=128, v_head_dim=128, scale=192**-0.5, dtype=dtype
    )  # fmt: skip


def measure_decode(bench: Bench, num_heads: int, num_rows: int, context_len: int) -> None:
    """`attend` as a layer calls it: both products of the heads' own matrices, and what reads the cache between them.
    The share counts the cache's bytes alone."""
    spec, device = deepseek(num_heads, bench.dtype), bench.device
    kernel = bench.kernels.choose(MLA, spec, bench.dtype)
    num_bytes = num_rows * context_len * spec.row_dim * bench.dtype.itemsize
    width = -(-context_len // BLOCK_SIZE)
    pool = kernel.allocate(bench.copies(num_bytes, 64), num_rows * width + 1, BLOCK_SIZE, device)
    for entry in pool.entries:
        entry.normal_()
    buffers = StepBuffers.allocate(num_rows, num_rows, width, num_rows * width, device)
    tables = torch.randperm(num_rows * width).view(num_rows, width)
    buffers.query_starts[1:].copy_(torch.arange(1, num_rows + 1))
    buffers.context_lens.fill_(context_len)
    buffers.block_tables[:, :width].copy_(tables)
    metadata = kernel.prepare(
        Step(num_uniform_rows=num_rows, uniform_len=1, max_context_len=context_len), buffers, BLOCK_SIZE
    )
    q_nope, q_rope = (bench.noise(num_rows, num_heads, size) for size in (spec.nope_dim, spec.rope_dim))
    expand = bench.noise(num_heads, spec.nope_dim + spec.v_head_dim, spec.latent_dim)
    us = bench.time_us([partial(kernel.attend, q_nope, q_rope, cache, expand, metadata) for cache in pool.layers])
    name = f"mla_{num_heads}_heads_{num_rows}x{context_len}"
    bench.keep(f"{name}_us", us)
    bench.keep(f"{name}_share", num_bytes / us * 1e6 / bench.bandwidth, 3)


def measure(bench: Bench, loads: Sequence[tuple[int, int]]) -> None:
    bench.measure_copy()
    for num_heads in HEADS:
        for num_rows, context_len in loads:
            measure_decode(bench, num_heads, num_rows, context_len)


def main() -> None:
    arguments = parse_arguments(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        raise SystemExit("bench-mla needs an NVIDIA GPU (ARGS=--quick runs it on the CPU, to see that it works)")
    is_small = arguments.quick and device.type == "cpu"
    bench = Bench(TINY if is_small else QWEN3_8B, device, torch.float32 if is_small else torch.bfloat16)
    with torch.inference_mode():
        measure(bench, SMALL if is_small else LOADS)
    print(bench.kernels.describe())
    finish(
        "mla",
        bench.figures,
        quick=arguments.quick,
        dtype=str(bench.dtype),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        packages=("torch", "triton"),
    )


if __name__ == "__main__":
    main()
