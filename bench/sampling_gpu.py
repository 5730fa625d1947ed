"""What sampling costs on a GPU, without a model: random logits of 256 rows and a vocabulary of 151,936, in bfloat16.

Time of the device for one step's sampling, by CUDA events over steps in a row; and of the host to submit it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from bench.common import Figure, finish, parse_arguments
from bench.sampling import FEATURES
from worker.core.batch import NewSequence, ScheduledBatch
from worker.core.params import SamplingParams
from worker.core.tokens import token_array
from worker.kernels.select import Kernels
from worker.runner.slots import SlotState
from worker.runner.staging import Staging
from worker.sampling.edits import History
from worker.sampling.sampler import Sampler, SamplingRows

HISTORY = 512
"""Tokens of each sequence so far, half of them its prompt."""
EVERY = {key: value for feature in FEATURES.values() for key, value in feature.items()}
CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "draw": FEATURES["draw"],
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "truncation": FEATURES["truncation"],
    "penalties": {"temperature": 0.0, **FEATURES["penalties"]},
    "rules": {"temperature": 0.0, **FEATURES["rules"]},
    "logprobs": {"temperature": 0.0, "num_logprobs": 20},
    "all_features": {**EVERY, "num_logprobs": 20},
}


def main() -> None:
    quick = parse_arguments(__doc__).quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not quick:
        raise SystemExit("bench-sampling-gpu needs a GPU (ARGS=--quick runs it on the CPU, to see that it works)")
    num_rows, vocab_size, repeats = (4, 4000, 1) if quick else (256, 151_936, 10)
    kernels = Kernels(device)
    sampler = Sampler(kernels)
    print(kernels.describe())
    figures: dict[str, Figure] = {}
    # The first is what random weights give, the second what a trained model does: a few likely tokens.
    for shape, scale in (("", 1.0), ("_peaked", 4.0)):
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(num_rows, vocab_size, generator=generator, device=device).mul_(scale).bfloat16()
        for name, features in CASES.items():
            rows = rows_of(SamplingParams(**features), num_rows, vocab_size, device)  # type: ignore[arg-type]
            device_us, host_us = microseconds(lambda rows=rows, logits=logits: sampler.sample(logits, rows), repeats)
            figures[f"{name}_us_{num_rows}{shape}"] = device_us
            if not shape:
                figures[f"{name}_host_us_{num_rows}"] = host_us
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    finish("sampling_gpu", figures, quick=quick, dtype="bfloat16", device=name, packages=("torch", "triton"))


def rows_of(params: SamplingParams, num_rows: int, vocab_size: int, device: torch.device) -> SamplingRows:
    slots = SlotState(num_rows, 1, HISTORY + 1, vocab_size, device, spare_block=0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab_size, (num_rows, HISTORY), generator=generator).tolist()
    # Only what has rules of its own has endings that come too early, as with `bench.sampling`.
    early = {"ending_token_ids": (0, 2), "min_length": HISTORY + 9} if params.logit_bias else {}
    news = [
        NewSequence(slot, token_array(tokens[slot]), HISTORY // 2, replace(params, seed=slot), (), **early)
        for slot in range(num_rows)
    ]
    batch = ScheduledBatch(0, [], [], [], token_array(), [], new_sequences=news)
    slots.apply(Staging(device).to_device(slots.stage(batch)))
    return SamplingRows(
        rules=slots.rules.of(list(range(num_rows))),
        history=History(
            slots.tables.tokens,
            torch.arange(num_rows, device=device),
            torch.full((num_rows,), HISTORY, device=device),
            HISTORY,
        ),
        parameters=slots.parameters,
        allowed=slots.allowed,
    )


def microseconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Of one call: the device's time (or the CPU's), and the host's to submit it; medians over some rounds."""
    is_cuda = torch.cuda.is_available()
    with torch.inference_mode():
        for _ in range(3):
            work()
        device_times, host_times = [], []
        for _ in range(5):
            if is_cuda:
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # The device has something to do until all is submitted, so that the host's pace does not count.
                torch.cuda._sleep(60_000_000)
                start.record()
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            host_times.append((time.perf_counter() - began) / repeats * 1e6)
            if is_cuda:
                end.record()
                torch.cuda.synchronize()
                device_times.append(start.elapsed_time(end) / repeats * 1e3)
    host = statistics.median(host_times)
    return round(statistics.median(device_times) if is_cuda else host, 1), round(host, 1)


if __name__ == "__main__":
    main()
