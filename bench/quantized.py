"""Quantised weights on one GPU: products alone, and models of Qwen3-8B's shape, beside those of bf16.

Products by CUDA graph, each call with weights of its own (see `bench.kernel_rig`). Models have random weights: in bf16,
and stored as float8 in blocks of 128 × 128 and as 4 bits in groups of 128. Greedy, 128 tokens in, 128 out.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.common import Figure, finish, median, parse_arguments
from bench.gpu import FULL, GIB, PACKAGES, QUICK, Plan, run_once
from bench.kernel_rig import QWEN3_8B, TINY, Bench
from bench.models import GROUP, QUANTIZED, write_model
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.weights import Blocks, Dense, Grouped, Weight
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig

ROWS = (1, 8, 64, 256, 1024)
REQUESTS = (1, 8, 64)
OUTPUT = 128


def of_float8(bench: Bench, out: int, inputs: int) -> Weight:
    scales = torch.full((out, max(1, inputs // GROUP)), 0.01, device=bench.device)
    return Grouped("e4m3", bench.noise(out, inputs).to(torch.float8_e4m3fn), scales)


def of_int4(bench: Bench, out: int, inputs: int, group: int) -> Weight:
    """Groups of 128 have whole zero points, as AWQ's, GPTQ's and W4A16's; those of 32 are as `--quantization int4`."""
    numbers = torch.randint(0, 16, (out, inputs), dtype=torch.uint8, device=bench.device)
    scales = torch.full((out, max(1, inputs // group)), 0.004, dtype=torch.float16, device=bench.device)
    return Grouped.of_blocks(Blocks(numbers, scales, scales * (-8 if group == GROUP else -7.5), 4))


FORMS: dict[str, Callable[[Bench, int, int], Weight]] = {
    "bf16": lambda bench, out, inputs: Dense(bench.noise(out, inputs)),
    "fp8": of_float8,
    "int4_128": partial(of_int4, group=128),
    "int4_32": partial(of_int4, group=32),
}


def measure_products(bench: Bench) -> None:
    for name, (out, inputs) in bench.shapes.linears.items():
        if name == "head":
            continue
        for form, make in FORMS.items():
            num = bench.copies(out * inputs / 2, 16)
            weights = [make(bench, out, inputs) for _ in range(num)]
            kernel = bench.kernels.find(LINEAR, LinearSpec(inputs, out, type(weights[0])), bench.dtype)
            if kernel is None:
                continue  # on a CPU
            packed = [kernel.pack(weight) for weight in weights]
            for num_rows in ROWS:
                x, result = bench.noise(num_rows, inputs), bench.noise(num_rows, out)
                calls = [partial(kernel, x, each, result) for each in packed]
                bench.keep(f"{form}_{num_rows}_{name}_us", bench.time_us(calls))


def measure_model(plan: Plan, name: str, config: RunnerConfig) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    with LocalEngine(config, log_level="info") as engine:
        memory = engine.model.memory
        figures[f"{name}_weights_gib"] = round(memory.weights / GIB, 2)
        figures[f"{name}_cache_tokens"] = memory.num_cache_tokens
        for number in REQUESTS:
            run_once(plan, engine, number, 128, 8, 99)
            runs = [run_once(plan, engine, number, 128, OUTPUT, seed) for seed in range(2)]
            figures[f"{name}_tok_s_{number}"] = median([run.tokens_per_second for run in runs], 1)
        seconds = [run_once(plan, engine, 1, 1024, 1, seed).seconds for seed in range(4)]
        figures[f"{name}_ttft_1024_ms"] = median([value * 1e3 for value in seconds[1:]])
    print(figures, flush=True)
    return figures


def measure_models(plan: Plan, folder: Path) -> dict[str, Figure]:
    config = partial(
        RunnerConfig, device=plan.device, dtype=plan.dtype, max_num_seqs=max(REQUESTS), max_num_batched_tokens=8192,
        max_model_len=2048,
    )  # fmt: skip
    plain = write_model(plan.large, folder / "plain")
    figures = measure_model(plan, "bf16", config(model=str(plain), load_format="dummy"))
    for stored in QUANTIZED:
        model = write_model(plan.large, folder / stored, weights=True, stored=stored)
        figures |= measure_model(plan, stored, config(model=str(model)))
        shutil.rmtree(model)
    return figures


def main() -> None:
    arguments = parse_arguments(__doc__, products="products alone")
    is_gpu = torch.cuda.is_available()
    if not is_gpu and not arguments.quick:
        raise SystemExit("bench-quantized needs an NVIDIA GPU (ARGS=--quick: a tiny model on the CPU)")
    device = torch.device("cuda" if is_gpu else "cpu")
    bench = Bench(QWEN3_8B if is_gpu else TINY, device, torch.bfloat16 if is_gpu else torch.float32)
    with torch.inference_mode():
        measure_products(bench)
    figures = bench.figures
    if not arguments.products:
        folder = Path(tempfile.mkdtemp(prefix="fissile-bench-"))
        try:
            figures |= measure_models(QUICK if arguments.quick else FULL, folder)
        finally:
            shutil.rmtree(folder)
    card = torch.cuda.get_device_name() if is_gpu else "cpu"
    finish("quantized", figures, quick=arguments.quick, dtype="bfloat16", device=card, packages=PACKAGES)


if __name__ == "__main__":
    main()
