"""Each operation of the kernel table alone, by CUDA graph, against what the card's memory or cuBLAS allows.

Shapes of Qwen3-8B. Every call of a graph has weights or a cache of its own, so that nothing is found in the L2 cache
that a whole model would have displaced. `--tiles` also tries other tiles of the linear layers and prints what is best.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.common import finish, parse_arguments
from bench.kernel_rig import BLOCK_SIZE, QWEN3_8B, TINY, Bench
from worker.kernels.elementwise import (
    EMBEDDING,
    GATED_ACTIVATION,
    RMS_NORM,
    ActivationSpec,
    EmbeddingSpec,
    NormSpec,
    RopeTable,
)
from worker.kernels.gqa import GQA, GqaCache, GqaKernel, GqaMetadata, GqaSpec, QkNorm
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.prepare import PREPARE_STEP
from worker.kernels.step import Chunk, SlotTables, StagedRows, Step, StepBuffers
from worker.kernels.weights import Dense
from worker.parallel.group import Group

LONGEST_TABLE = 640
"""Blocks that a row may have: kernels prepare for rows longer than those here."""


@dataclass(frozen=True)
class Loads:
    """Rows, tokens a row, contexts of what is timed."""

    decode: list[tuple[int, int]]
    verify: list[tuple[int, int, int]]
    prefill: list[tuple[int, int]]
    activations: list[int]
    linear: list[int]


FULL = Loads(
    decode=[(1, 256), (8, 256), (8, 8192), (64, 256), (64, 1024), (256, 256), (256, 1024)],
    verify=[(8, 1024, 4), (64, 1024, 4)],
    prefill=[(512, 0), (1024, 0), (8192, 0), (512, 512), (1024, 4096), (2048, 6144)],
    activations=[1, 64, 256, 4096],
    linear=[1, 4, 8, 16, 32, 64],
)
SMALL = Loads([(4, 64)], [(2, 32, 3)], [(32, 0), (16, 32)], [4], [1, 4])


def measure_linear(bench: Bench, rows: Sequence[int], *, tiles: bool) -> None:
    for name, (out_features, in_features) in bench.shapes.linears.items():
        linear = bench.kernels.choose(LINEAR, LinearSpec(in_features, out_features), bench.dtype)
        num = bench.copies(out_features * in_features * 2, 16)
        weights = [bench.noise(out_features, in_features) for _ in range(num)]
        packed = [linear.pack(Dense(weight)) for weight in weights]
        for num_rows in rows:
            x, out = bench.noise(num_rows, in_features), bench.noise(num_rows, out_features)
            calls = [partial(linear, x, weight, out) for weight in packed]
            bench.keep(f"linear_{num_rows}_{name}_us", bench.time_us(calls))
            calls = [partial(functional.linear, x, weight) for weight in weights]
            bench.keep(f"cublas_{num_rows}_{name}_us", bench.time_us(calls))
            if tiles and 1 < num_rows <= 128:
                explore_tiles(bench, weights, x, out, name)


def explore_tiles(bench: Bench, weights: list[Tensor], x: Tensor, out: Tensor, name: str) -> None:
    """The best five of all tiles, for whoever writes the rule that chooses them."""
    from triton.runtime.errors import OutOfResources

    from worker.kernels.torch.linear import PackedLinear
    from worker.kernels.triton.linear import TritonLinear
    from worker.kernels.triton.linear_rows import Tile
    from worker.kernels.triton.machine import machine_of

    spec = LinearSpec(x.shape[1], out.shape[1])
    linear, found = TritonLinear(spec, machine_of(bench.device), bench.dtype), []
    rows = max(16, 1 << (len(x) - 1).bit_length())
    for outputs, piece, stages, warps in itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 5), (4, 8)):
        tile = Tile(rows, outputs, piece, stages, warps)
        calls = [partial(linear.launch, x, PackedLinear(weight, None), out, tile) for weight in weights]
        try:
            found.append((bench.time_us(calls, 5), tile))
        except OutOfResources:
            continue
    for us, tile in sorted(found, key=lambda pair: pair[0])[:5]:
        print(f"  {name} {len(x)} rows: {us:.1f} us, {tile}", flush=True)


@dataclass(frozen=True)
class Cached:
    """Rows over a cache of `layers`, blocks in random order."""

    kernel: GqaKernel
    layers: list[GqaCache]
    metadata: GqaMetadata
    qkv: Tensor
    norm: QkNorm
    rope: RopeTable


def cached_rows(bench: Bench, step: Step, context_lens: Sequence[int], query_lens: Sequence[int]) -> Cached:
    shapes, device = bench.shapes, bench.device
    spec = GqaSpec(shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.head_dim**-0.5, bench.dtype)
    kernel = bench.kernels.choose(GQA, spec, bench.dtype)
    width = -(-max(context_lens) // BLOCK_SIZE)
    num_rows, num_blocks = len(context_lens), width * len(context_lens)
    num_bytes = sum(context_lens) * 2 * shapes.kv_heads * shapes.head_dim * 2
    pool = kernel.allocate(bench.copies(num_bytes, 64), num_blocks + 1, BLOCK_SIZE, device)
    for entry in pool.entries:
        entry.normal_()
    buffers = StepBuffers.allocate(step.num_tokens, num_rows, max(width, LONGEST_TABLE), num_blocks, device)
    tables = torch.randperm(num_blocks).view(num_rows, width)
    positions = [p for n, q in zip(context_lens, query_lens, strict=True) for p in range(n - q, n)]
    owners = torch.arange(num_rows).repeat_interleave(torch.tensor(query_lens))
    at = torch.tensor(positions)
    buffers.positions.copy_(at)
    buffers.token_slots.copy_(tables[owners, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    buffers.query_starts[1:].copy_(torch.tensor(query_lens).cumsum(0))
    buffers.context_lens.copy_(torch.tensor(context_lens))
    buffers.block_tables[:, :width].copy_(tables)
    qkv = bench.noise(step.num_tokens, (shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim)
    table = torch.ones(max(context_lens), shapes.head_dim, device=device, dtype=bench.dtype)
    norm = QkNorm(bench.noise(shapes.head_dim), bench.noise(shapes.head_dim), 1e-6)
    return Cached(kernel, pool.layers, kernel.prepare(step, buffers, BLOCK_SIZE), qkv, norm, RopeTable(table, table))


def attention_us(bench: Bench, rows: Cached) -> float:
    kernel = rows.kernel
    q, k, v = kernel.write_qkv(rows.qkv, None, None, rows.layers[0], rows.metadata)
    return bench.time_us([partial(kernel.attend, q, k, v, cache, rows.metadata) for cache in rows.layers])


def measure_decode(bench: Bench, num_rows: int, context_len: int, num_tokens: int = 1) -> None:
    step = Step(num_uniform_rows=num_rows, uniform_len=num_tokens, max_context_len=context_len)
    rows = cached_rows(bench, step, [context_len] * num_rows, [num_tokens] * num_rows)
    us = attention_us(bench, rows)
    num_bytes = num_rows * context_len * 2 * bench.shapes.kv_heads * bench.shapes.head_dim * bench.dtype.itemsize
    name = ("decode" if num_tokens == 1 else f"verify_{num_tokens}") + f"_{num_rows}x{context_len}"
    bench.keep(f"{name}_us", us)
    bench.keep(f"{name}_gb_s", num_bytes / us / 1e3, 0)
    bench.keep(f"{name}_share", num_bytes / us * 1e6 / bench.bandwidth, 3)


def measure_write(bench: Bench, num_rows: int) -> None:
    rows = cached_rows(bench, Step(num_uniform_rows=num_rows, max_context_len=64), [64] * num_rows, [1] * num_rows)
    calls = [
        partial(rows.kernel.write_qkv, rows.qkv, rows.norm, rows.rope, cache, rows.metadata) for cache in rows.layers
    ]
    bench.keep(f"write_qkv_{num_rows}_us", bench.time_us(calls))


def measure_prefill(bench: Bench, num_tokens: int, prefix: int) -> None:
    """FLOPs of a causal product: half of the square, and the whole of the prefix."""
    step = Step(
        num_uniform_rows=0, chunks=(Chunk(num_tokens, prefix + num_tokens),), max_context_len=prefix + num_tokens
    )
    rows = cached_rows(bench, step, [prefix + num_tokens], [num_tokens])
    rows = replace(rows, layers=rows.layers[:4])
    us = attention_us(bench, rows)
    flops = 4 * bench.shapes.heads * bench.shapes.head_dim * num_tokens * (prefix + num_tokens / 2)
    bench.keep(f"prefill_{num_tokens}_after_{prefix}_us", us)
    bench.keep(f"prefill_{num_tokens}_after_{prefix}_tflop_s", flops / us / 1e6, 0)


def measure_small(bench: Bench, num_rows: int) -> None:
    """Operations over activations: launches, more than bytes."""
    shapes, dtype = bench.shapes, bench.dtype
    norm = bench.kernels.choose(RMS_NORM, NormSpec(shapes.hidden), dtype)
    silu = bench.kernels.choose(GATED_ACTIVATION, ActivationSpec(shapes.intermediate), dtype)
    embed = bench.kernels.choose(EMBEDDING, EmbeddingSpec(shapes.hidden), dtype)
    x, residual, weight = (
        bench.noise(num_rows, shapes.hidden),
        bench.noise(num_rows, shapes.hidden),
        bench.noise(shapes.hidden),
    )
    gate_up, table = bench.noise(num_rows, 2 * shapes.intermediate), bench.noise(shapes.vocab, shapes.hidden)
    ids = torch.randint(shapes.vocab, (num_rows,), device=bench.device)
    for name, call in {
        "add_norm": lambda: norm.add_norm(x, residual, weight, 1e-6, Group()),
        "gated_activation": lambda: silu(gate_up),
        "embedding": lambda: embed(ids, table),
    }.items():
        bench.keep(f"{name}_{num_rows}_us", bench.time_us([call] * 20))


def measure_prepare_step(bench: Bench, num_rows: int) -> None:
    width, device = 128, bench.device
    prepare = bench.kernels.choose(PREPARE_STEP, None, torch.int64)
    slots = SlotTables(
        bench.integers(num_rows + 1, 2049, dtype=torch.int32),
        torch.full((num_rows + 1,), 1024, device=device),
        bench.integers(num_rows + 1, width, dtype=torch.int32),
        bench.integers(num_rows + 1),
    )
    buffers = StepBuffers.allocate(num_rows, num_rows, width, 1, device)
    places = torch.arange(num_rows, device=device)
    rows = StagedRows(places, places, torch.ones_like(places))
    step = Step(num_uniform_rows=num_rows, max_context_len=1100)
    bench.keep(
        f"prepare_step_{num_rows}_us", bench.time_us([lambda: prepare(rows, slots, step, BLOCK_SIZE, buffers)] * 10)
    )


def measure(bench: Bench, loads: Loads, *, tiles: bool) -> None:
    bench.measure_copy()
    for num_rows, context_len in loads.decode:
        measure_decode(bench, num_rows, context_len)
    for num_rows, context_len, num_tokens in loads.verify:
        measure_decode(bench, num_rows, context_len, num_tokens)
    for num_tokens, prefix in loads.prefill:
        measure_prefill(bench, num_tokens, prefix)
    for num_tokens in loads.activations:
        measure_small(bench, num_tokens)
        measure_write(bench, num_tokens)
    measure_prepare_step(bench, loads.decode[-1][0])
    measure_linear(bench, loads.linear, tiles=tiles)


def main() -> None:
    arguments = parse_arguments(__doc__, tiles="try other tiles of the linear layers, too")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        raise SystemExit("bench-kernels needs an NVIDIA GPU (ARGS=--quick runs it on the CPU, to see that it works)")
    is_small = arguments.quick and device.type == "cpu"
    bench = Bench(TINY if is_small else QWEN3_8B, device, torch.float32 if is_small else torch.bfloat16)
    with torch.inference_mode():
        measure(bench, SMALL if is_small else FULL, tiles=arguments.tiles)
    print(bench.kernels.describe())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    finish(
        "kernels",
        bench.figures,
        quick=arguments.quick,
        dtype=str(bench.dtype),
        device=name,
        packages=("torch", "triton"),
    )


if __name__ == "__main__":
    main()
