"""AITER's Triton operations in bf16 on an NVIDIA GPU, with the tests' shims: each against float64, then Qwen3-8B.

    python -m tests.kernels.aiter.on_nvidia          # the GPU; needs triton and amd-aiter (its folder aiter/ops/triton)
    python -m tests.kernels.aiter.on_nvidia --cpu    # the script itself, with a tiny model and the interpreter

Says what is wrong and goes on; the exit code is 1 if anything was. AITER is not made for this GPU: its times here say
nothing of AMD's.
"""

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.models import write_model
from tests.kernels.aiter import checks
from tests.kernels.aiter.shim import on_cpu, on_nvidia
from tests.kernels.rig import Rig
from tests.runner.conftest import random_prompt
from tests.runner.driver import Driver
from tests.runner.logits import capture_logits
from worker.kernels.select import Kernels
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

ARCHITECTURE = "gfx950"
"""For which this release has a configuration of every kernel."""
SHAPES = [(4, 2, 16), (8, 2, 64), (8, 1, 128), (4, 4, 256)]
MAX_ERROR = 0.05
"""Of logits, relative to the largest: bf16 through all layers, summed in another order."""


@dataclass(frozen=True)
class Machine:
    device: str
    dtype: str
    model: str
    shapes: list[checks.Shape]
    prompt_len: int
    num_rows: tuple[int, ...]


GPU = Machine("cuda", "bfloat16", "qwen3-8b", SHAPES, 256, (1, 8, 64))
CPU = Machine("cpu", "float16", "tiny", SHAPES[:1], 5, ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    machine = CPU if parser.parse_args().cpu else GPU
    with on_cpu(ARCHITECTURE) if machine is CPU else on_nvidia(ARCHITECTURE):
        results = [_passes(name, check) for name, check in operation_checks(machine).items()]
        results.append(_passes("model", partial(check_model, machine)))
    print(f"{sum(results)} of {len(results)} passed")
    sys.exit(not all(results))


def _passes(name: str, check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        print(f"WRONG  {name}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"right  {name}", flush=True)
    return True


def operation_checks(machine: Machine) -> dict[str, Callable[[], None]]:
    rig = Rig(Kernels(torch.device(machine.device), "aiter"), getattr(torch, machine.dtype))
    found: dict[str, Callable[[], None]] = {
        check.__name__: partial(check, rig) for check in (checks.rms_norm, checks.add_rms_norm, checks.linear)
    }
    for shape in machine.shapes:
        for uniform_len in (1, 3):
            found[f"uniform_rows {shape} {uniform_len}"] = partial(checks.uniform_rows, rig, shape, uniform_len)
        found[f"mixed_step {shape}"] = partial(checks.mixed_step, rig, shape)
        found[f"window and sinks {shape}"] = partial(checks.mixed_step, rig, shape, window=7, has_sinks=True)
        for norm, rope in ((True, True), (False, True), (True, False)):
            found[f"norm {norm} rope {rope} {shape}"] = partial(checks.norm_and_rope, rig, shape, norm, rope)
    return found


def check_model(machine: Machine) -> None:
    """The logits of a prefill and of a decode step against those of torch's kernels; times of decode steps."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(machine.model, Path(folder) / machine.model)
        expected, mine = (_logits(machine, model, backend) for backend in ("torch", "aiter"))
        for name, got, exact in zip(("prefill", "decode"), mine, expected, strict=True):
            error = float((got - exact).abs().max() / exact.abs().max())
            same = float((got.argmax(-1) == exact.argmax(-1)).float().mean())
            print(f"{machine.model}, {name}: off by {error:.4f} of the largest logit, {same:.0%} of tokens the same")
            assert error < MAX_ERROR
        if machine.num_rows:
            _print_times(machine, model)


def _driver(machine: Machine, model: Path, backend: str, *, enforce_eager: bool) -> Driver:
    gc.collect()  # the one before, if there was one
    config = RunnerConfig(
        model=str(model), load_format="dummy", device=machine.device, dtype=machine.dtype,  # type: ignore[arg-type]
        kernel_backend=backend, num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=1024,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    runner, info = build_runner(config, Group())
    print(f"kernels: {info.kernels}", flush=True)
    return Driver(runner, info.num_blocks, info.block_size)


def _logits(machine: Machine, model: Path, backend: str) -> list[Tensor]:
    driver = _driver(machine, model, backend, enforce_eager=True)
    seen = capture_logits(driver)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, machine.prompt_len)]
    driver.prefill(*seqs)
    for seq in seqs:
        seq.feed(7)
    driver.decode(*seqs)
    return [step.float().cpu() for step in seen]


def _print_times(machine: Machine, model: Path) -> None:
    driver, steps = _driver(machine, model, "aiter", enforce_eager=False), 20
    seqs = [driver.add(random_prompt(machine.prompt_len, n)) for n in range(max(machine.num_rows))]
    for seq in seqs:
        driver.prefill(seq)
    for num_rows in machine.num_rows:
        driver.decode(*seqs[:num_rows], steps=2)
        begin = time.perf_counter()
        driver.decode(*seqs[:num_rows], steps=steps)
        print(f"{machine.model}, {num_rows} rows: {(time.perf_counter() - begin) / steps * 1e3:.2f} ms a decode step")


if __name__ == "__main__":
    main()
