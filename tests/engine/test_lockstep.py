"""Two workers of two ranks each that hold half of a model's experts (Qwen3-MoE, tiny): neither computes a token alone,
and neither outlives the other."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.lockstep import Worker, end_of, running_workers
from tests.models.cases import VOCABULARY
from tests.models.cases.qwen3_moe import CASES
from tests.models.saved import Saved, save

END_SECONDS = 20
"""They are to end within 5 s, and take a tenth of one on an idle machine."""


def random_prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCABULARY), k=length)


PROMPTS = [random_prompt(length) for length in (1, 7, 40)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(CASES["qwen3-moe"], tmp_path_factory.mktemp("lockstep") / "model")


@pytest.fixture(scope="module")
def workers(saved: Saved) -> Iterator[list[Worker]]:
    with running_workers(saved.path, num_dp=2, num_tp=2) as running:
        yield running


def test_tokens_of_each_are_those_of_one_worker(workers: list[Worker], saved: Saved) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(worker.generate, *PROMPTS[number:], max_tokens=24) for number, worker in enumerate(workers)]
    for number, job in enumerate(jobs):
        for prompt, output in zip(PROMPTS[number:], job.result(), strict=True):
            saved.assert_greedy(prompt, output)


def test_one_that_has_nothing_to_do_computes_for_the_other(workers: list[Worker], saved: Saved) -> None:
    for worker in workers:
        (output,) = worker.generate([5, 6, 7], max_tokens=12)
        saved.assert_greedy([5, 6, 7], output)


def test_workers_of_unequal_work_do_not_wait_for_each_other(workers: list[Worker], saved: Saved) -> None:
    """One is busy all the time; the other has nothing, or little, now and then."""
    busy, other = workers
    first, num_steps = busy.num_steps, 220

    def work_now_and_then() -> None:
        draw = random.Random(1)
        while busy.num_steps < first + num_steps - 40:
            time.sleep(draw.choice((0, 0.001, 0.02)))
            prompt = random_prompt(draw.randint(1, 60))
            (output,) = other.generate(prompt, max_tokens=draw.choice((1, 1, 2, 5)))
            saved.assert_greedy(prompt, output)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work_now_and_then)
        for output in busy.generate([8, 9], [10], max_tokens=num_steps):
            assert len(output) == num_steps
        working.result()
    saved.assert_greedy([8, 9], busy.generate([8, 9], max_tokens=4)[0])


def test_a_killed_rank_ends_both_workers(workers: list[Worker]) -> None:
    """It comes last: nobody is left. One worker is busy; the other, whose rank it is, has nothing to do."""
    busy, idle = workers
    last = busy.num_steps + 20
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(end_of, lambda: busy.generate([1], max_tokens=250)),
            pool.submit(end_of, idle.wait_for_end),
        ]
        while busy.num_steps < last and not ends[0].done():
            time.sleep(0.01)
        os.kill(idle.rank_pids[1], signal.SIGKILL)
        of_busy, of_idle = [end.result(END_SECONDS) for end in ends]
    assert of_busy.startswith("data-parallel rank 1 is lost: rank 1 was killed by signal 9")
    assert of_idle.startswith("rank 1 was killed by signal 9")
