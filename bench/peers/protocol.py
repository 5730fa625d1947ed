"""What a peer script speaks. Standard library only: it runs in the peers' environments."""

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Requests to run at once, greedy, to exactly `output_length` tokens each."""

    num_requests: int
    prompt_length: int
    output_length: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Random token ids, different for each request and seed, so that no prefix cache helps."""
        rng = random.Random(self.seed)
        return [[rng.randrange(1000, 40000) for _ in range(self.prompt_length)] for _ in range(self.num_requests)]


@dataclass(frozen=True)
class Report:
    """What came of a job."""

    seconds: float
    ttft_seconds: float
    """Until the first token of all of them."""
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def serve(run: Callable[[list[list[int]], int], tuple[float, int]]) -> None:
    """Answer jobs from standard input until it ends.

    `run` takes prompts and the number of new tokens; returns the time of the first token (by time.perf_counter) and the
    number of tokens generated.
    """
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        begin = time.perf_counter()
        first, num_tokens = run(job.prompts(), job.output_length)
        end = time.perf_counter()
        answer = {"seconds": end - begin, "ttft_seconds": first - begin, "num_tokens": num_tokens}
        print(json.dumps(answer), file=out, flush=True)
