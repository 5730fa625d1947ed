"""Gated DeltaNet in Qwen3-Next's shape, one layer: decode steps and prompts, in Triton and in torch's operations."""

from functools import partial

import torch

from bench.common import finish, parse_arguments
from bench.kernel_rig import QWEN3_8B, TINY, Bench
from worker.kernels.delta import DELTA, GATED_NORM, DeltaParameters, DeltaSpec, DeltaState, GatedNormSpec
from worker.kernels.select import Kernels
from worker.kernels.step import Chunk, Step, StepBuffers

ROWS = (1, 16, 64, 256)
PROMPTS = (1024, 8192)
SMALL_ROWS, SMALL_PROMPTS = (2,), (70,)


def measure_layer(bench: Bench, backend: str, step: Step, name: str) -> None:
    """Convolution, rule and gated norm, as a layer calls them. The share counts the recurrent state of rows of one
    token, read and written."""
    spec = DeltaSpec(16, 32, 128, 128, 4, bench.dtype)
    kernels = Kernels(bench.device, backend)
    rule = kernels.choose(DELTA, spec, bench.dtype)
    norm = kernels.choose(GATED_NORM, GatedNormSpec(spec.value_dim), bench.dtype)
    heads, channels, device = spec.num_value_heads, spec.num_channels, bench.device
    parameters = DeltaParameters(
        *(torch.rand(size, device=device) for size in ((heads,), (heads,), (channels, spec.width)))
    )
    num_bytes = 2 * step.num_rows * spec.value_size * spec.key_dim * 4
    states = [
        DeltaState.zeros(spec, step.num_rows + 1, device)
        for _ in range(2 if step.chunks else bench.copies(num_bytes, 16))
    ]
    for state in states:
        state.inputs.copy_(bench.noise(*state.inputs.shape))
    buffers = StepBuffers.allocate(step.num_tokens, step.num_rows, 1, 1, device)
    buffers.groups.copy_(torch.arange(step.num_rows))
    lens = torch.tensor([1] * step.num_uniform_rows + [chunk.num_tokens for chunk in step.chunks])
    buffers.query_starts[1:].copy_(lens.cumsum(0))
    metadata = rule.prepare(step, buffers, None)
    projected = bench.noise(step.num_tokens, channels + spec.value_size + 2 * heads)
    qkv, gate, b, a = projected.split((channels, spec.value_size, heads, heads), -1)
    gate, weight = gate.unflatten(-1, (heads, spec.value_dim)), bench.noise(spec.value_dim)

    def layer(state: DeltaState) -> torch.Tensor:
        mixed = rule.convolve(qkv, parameters, state, metadata)
        return norm(rule.update(mixed, a, b, parameters, state, metadata), gate, weight, 1e-6)

    us = bench.time_us([partial(layer, state) for state in states])
    bench.keep(f"{name}_{backend}_us", us)
    if not step.chunks:
        bench.keep(f"{name}_{backend}_share", num_bytes / us * 1e6 / bench.bandwidth, 3)


def measure(bench: Bench, rows: tuple[int, ...], prompts: tuple[int, ...], backends: tuple[str, ...]) -> None:
    bench.measure_copy()
    for backend in backends:
        for num_rows in rows:
            measure_layer(bench, backend, Step(num_uniform_rows=num_rows, max_context_len=9), f"delta_rows_{num_rows}")
        for length in prompts:
            step = Step(num_uniform_rows=0, chunks=(Chunk(length, length),), max_context_len=length)
            measure_layer(bench, backend, step, f"delta_prompt_{length}")


def main() -> None:
    arguments = parse_arguments(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        raise SystemExit("bench-delta needs an NVIDIA GPU (ARGS=--quick runs it on the CPU, to see that it works)")
    is_small = device.type == "cpu"
    bench = Bench(TINY if is_small else QWEN3_8B, device, torch.float32 if is_small else torch.bfloat16)
    with torch.inference_mode():
        if is_small:
            measure(bench, SMALL_ROWS, SMALL_PROMPTS, ("torch",))
        else:
            measure(bench, ROWS, PROMPTS, ("triton", "torch"))
    finish(
        "delta", bench.figures, quick=arguments.quick, dtype=str(bench.dtype),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu", packages=("torch", "triton"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
