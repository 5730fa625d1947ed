"""Whether an NVIDIA GPU is right: the same tokens as on the CPU, asynchronous steps, swap through pinned memory.

SmolLM2 in float32, greedy, so its speed says little: `bench.gpu` measures that.
"""

import os
import random

import torch

from bench.common import Figure, finish, median, parse_arguments
from worker.loader.source import resolve_model
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig

MODEL = os.environ.get("FISSILE_BENCH_MODEL", "smollm2")
PACKAGES = ("torch", "transformers", "triton")


def main() -> None:
    quick = parse_arguments(__doc__).quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not quick:
        raise SystemExit("bench-cuda needs an NVIDIA GPU (ARGS=--quick runs it on the CPU, to see that it works)")
    num_prompts, num_tokens, repeats = (4, 8, 1) if quick else (20, 64, 5)
    prompts = random_prompts(num_prompts)
    figures: dict[str, Figure] = {}
    with LocalEngine(runner_config(device)) as gpu:
        figures |= token_equality(gpu, prompts, num_tokens)
        figures |= asynchronous_stepping(gpu, 4 if quick else 64, num_tokens, repeats)
        figures |= swap(gpu, prompts, num_tokens)
    finish("cuda", figures, quick=quick, dtype="float32", device=device_name(device), packages=PACKAGES)


def runner_config(device: str) -> RunnerConfig:
    return RunnerConfig(
        model=MODEL, device=device, dtype="float32", max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=2048,
        num_blocks=2048, swap_space_gib=0.5,
    )  # fmt: skip


def random_prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1000, 40000) for _ in range(rng.randrange(5, 200))] for _ in range(count)]


def token_equality(gpu: LocalEngine, prompts: list[list[int]], num_tokens: int) -> dict[str, Figure]:
    """Equal tokens with the CPU run and with transformers on the GPU, of all tokens; alone and all at once."""
    together = gpu.generate(prompts, num_tokens, async_depth=1).token_ids
    alone = [gpu.generate([prompt], num_tokens, async_depth=0).token_ids[0] for prompt in prompts]
    with LocalEngine(runner_config("cpu")) as engine:
        cpu = engine.generate(prompts, num_tokens, async_depth=0).token_ids
    reference = transformers_tokens(prompts, num_tokens)
    total = len(prompts) * num_tokens
    figures: dict[str, Figure] = {"num_tokens_compared": total}
    for name, other in (("alone", alone), ("cpu", cpu), ("transformers", reference)):
        equal = sum(a == b for xs, ys in zip(together, other, strict=True) for a, b in zip(xs, ys, strict=True))
        figures[f"equal_tokens_{name}"] = equal
        print(f"together against {name}: {equal} of {total} tokens equal", flush=True)
    return figures


def transformers_tokens(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    path = resolve_model(MODEL).path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def asynchronous_stepping(gpu: LocalEngine, num_seqs: int, num_tokens: int, repeats: int) -> dict[str, Figure]:
    """Steps with the next one scheduled meanwhile, beside steps one after another.

    The gap share is the time in which the device's process had no step to work on.
    """
    prompts = random_prompts(num_seqs)
    figures: dict[str, Figure] = {}
    gpu.generate(prompts, 8, async_depth=0)
    runs = {depth: [gpu.generate(prompts, num_tokens, async_depth=depth) for _ in range(repeats)] for depth in (0, 1)}
    for depth, name in ((0, "sync"), (1, "async")):
        figures[f"{name}_tok_s_{num_seqs}"] = median([run.tokens_per_second for run in runs[depth]], 1)
        figures[f"{name}_step_ms_{num_seqs}"] = median([run.seconds / len(run.steps) * 1e3 for run in runs[depth]], 3)
        figures[f"{name}_gap_share_{num_seqs}"] = median([run.gap_share for run in runs[depth]], 3)
    assert runs[0][0].token_ids == runs[1][0].token_ids
    return figures


def swap(gpu: LocalEngine, prompts: list[list[int]], num_tokens: int) -> dict[str, Figure]:
    """The same tokens from a pool too small for all, with sequences swapped out to host memory and back."""
    needed = sum(-(-(len(prompt) + num_tokens) // 16) for prompt in prompts)
    roomy = gpu.generate(prompts, num_tokens, async_depth=1)
    tight = gpu.generate(prompts, num_tokens, async_depth=1, num_blocks=needed // 2, preemption_mode="swap")
    equal = sum(
        a == b for xs, ys in zip(roomy.token_ids, tight.token_ids, strict=True) for a, b in zip(xs, ys, strict=True)
    )
    return {
        "num_swaps": tight.load.num_swaps,
        "equal_tokens_swap": equal,
        "swap_tok_s": round(tight.tokens_per_second, 1),
    }


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
