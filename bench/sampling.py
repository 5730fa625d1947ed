"""What sampling costs: a batch of decoding sequences with every feature on, against the same batch decoded greedily."""

import random
from dataclasses import replace

from bench.common import Figure, finish, median, num_cores, parse_arguments
from worker.core.params import StopConditions
from worker.local import GREEDY, LocalEngine
from worker.runner.config import RunnerConfig

PACKAGES = ("torch", "transformers", "llguidance", "fissile")
EOS = (0, 2)
PROMPT_TOKENS = 32

FEATURES: dict[str, dict[str, object]] = {
    "draw": {"temperature": 0.8},
    "truncation": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "rules": {
        "logit_bias": tuple((token, 1.0) for token in range(100, 110)),
        "allowed_token_ids": tuple(range(3, 10_000)),
        "banned_token_ids": tuple(range(20, 40)),
        "bad_token_sequences": ((50, 51), (60, 61, 62), (70,)),
    },
    "logprobs": {"num_logprobs": 5},
}
"""What each adds to greedy decoding. The figure called "all" has all of them, and min_tokens, at once."""


def main() -> None:
    quick = parse_arguments(__doc__).quick
    num_rows, num_tokens, num_rounds = (4, 8, 1) if quick else (64, 24, 3)
    threads = num_cores()
    config = RunnerConfig(
        model="smollm2", max_num_seqs=num_rows, max_model_len=1024, num_threads=threads, max_num_batched_tokens=4096
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]
    every = {key: value for feature in FEATURES.values() for key, value in feature.items()}
    cases = {"greedy": {}, **FEATURES, "all_features": every}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with LocalEngine(config) as engine:
        for turn in range(-1, num_rounds):  # the first warms up
            for name, features in cases.items():  # taking turns, because the machine drifts
                rows = [replace(GREEDY, seed=i, **features) for i in range(num_rows)]
                stop = stop_after(num_tokens, early=name == "all_features")
                run = engine.generate(prompts, num_tokens, async_depth=1, sampling=rows, stop=stop)
                if turn >= 0:
                    seconds[name] += run.decode_step_seconds
    figures: dict[str, Figure] = {
        f"{name}_step_ms_{num_rows}": median([value * 1e3 for value in values], 1) for name, values in seconds.items()
    }
    for name in cases:
        if name != "greedy":
            figures[f"ratio_{name}_{num_rows}"] = round(median(seconds[name], 6) / median(seconds["greedy"], 6), 3)
    finish("sampling", figures, quick=quick, dtype="float32", threads=threads, packages=PACKAGES)


def stop_after(num_tokens: int, *, early: bool) -> StopConditions:
    """`early`: endings exist, and must not come before the last token."""
    return StopConditions(
        max_tokens=num_tokens, min_tokens=num_tokens if early else 0, eos_token_ids=frozenset(EOS if early else ())
    )


if __name__ == "__main__":
    main()
