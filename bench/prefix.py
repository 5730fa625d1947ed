"""What a cached prefix saves: time to first token of 1,024 tokens, cold and repeated, through the whole service."""

import random

from bench.common import Figure, finish, median, num_cores, parse_arguments
from fissile import Client
from fissile.cli.cluster import ClusterConfig, running_cluster

PACKAGES = ("torch", "grpcio", "fissile")


def main() -> None:
    quick = parse_arguments(__doc__).quick
    length, num_prompts, num_repeats = (128, 2, 1) if quick else (1024, 7, 3)
    threads = num_cores()
    arguments = ("--num-threads", str(threads), "--max-model-len", "2048")
    with (
        running_cluster(ClusterConfig(1, 0, "smollm2", arguments), lambda _name, _line: None) as cluster,
        Client(cluster.router_address) as client,
    ):
        ttft(client, random_prompt(0, length))  # warm up
        cold, cached = [], []
        for seed in range(1, num_prompts + 1):
            prompt = random_prompt(seed, length)
            cold.append(ttft(client, prompt))
            cached += [ttft(client, prompt) for _ in range(num_repeats)]
    figures: dict[str, Figure] = {
        f"ttft_cold_ms_{length}": median([seconds * 1e3 for seconds in cold], 1),
        f"ttft_cached_ms_{length}": median([seconds * 1e3 for seconds in cached], 1),
    }
    figures[f"ttft_ratio_{length}_cached"] = round(median(cached, 6) / median(cold, 6), 4)
    finish("prefix", figures, quick=quick, dtype="float32", threads=threads, packages=PACKAGES)


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(length)]


def ttft(client: Client, prompt: list[int]) -> float:
    answer = client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True).result()
    assert answer.timings.ttft is not None
    return answer.timings.ttft


if __name__ == "__main__":
    main()
