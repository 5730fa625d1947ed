"""Runners over a tiny Llama, one for each block size, and the greedy reference by transformers."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.loop import Loop
from tests.runner.conftest import greedy_reference, random_prompt, save_llama
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.drafter import Drafter
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.model_runner import ModelRunner

NUM_TOKENS = 20
MAX_MODEL_LEN = 96


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


def _prompts() -> list[list[int]]:
    """Of many lengths; some share a long prefix, two are equal, and one is a prefix of another."""
    shared = random_prompt(40, seed=1)
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 17, 33)]
    prompts += [shared + random_prompt(n, seed=50 + n) for n in (3, 9, 20)]
    return [*prompts, shared, prompts[4]]


PROMPTS = _prompts()


class TinyModel:
    """Everything is made once a session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reference_model = save_llama(path)
        self.references = [greedy_reference(self.reference_model, prompt, NUM_TOKENS) for prompt in PROMPTS]
        self.runner = cache(self._runner)

    def _runner(self, block_size: int, kernel_backend: str = "auto") -> ModelRunner:
        config = RunnerConfig(
            model=str(self.path),
            device="cpu",
            kernel_backend=kernel_backend,
            block_size=block_size,
            num_blocks=1024 // block_size,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            swap_space_gib=0.01,
        )
        return build_runner(config, Group())[0]

    def loop(
        self,
        block_size: int,
        num_tokens_in_cache: int = 1024,
        prefix: str = "off",
        kernel_backend: str = "auto",
        drafter: Drafter | None = None,
        **scheduler,
    ) -> Loop:
        """A fresh scheduler over the runner of this block size."""
        num_host_blocks = 512 // block_size if scheduler.get("preemption_mode") == "swap" else 0
        options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 256}
        return Loop(
            self.runner(block_size, kernel_backend),
            SchedulerConfig(**(options | scheduler)),
            CacheConfig(
                num_blocks=num_tokens_in_cache // block_size,
                block_size=block_size,
                num_host_blocks=num_host_blocks,
                enable_prefix_caching=prefix != "off",
                prefix_index="hash" if prefix == "off" else prefix,
            ),
            drafter,
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("tiny-llama"))
