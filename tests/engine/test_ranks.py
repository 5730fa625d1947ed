"""Two tensor-parallel ranks as processes (gloo): preemption and swap reach both alike (case 3)."""

from collections.abc import Iterator

import pytest

from tests.engine.conftest import MAX_MODEL_LEN, NUM_TOKENS, PROMPTS, TinyModel
from tests.engine.loop import Loop, make_sequence
from tests.engine.ranks import Ranks
from tests.engine.reciter import Reciter
from worker.core.config import CacheConfig, SchedulerConfig
from worker.executor.executor import Executor
from worker.runner.config import RunnerConfig

NUM_BLOCKS = 8


@pytest.fixture(scope="module")
def ranks(tiny: TinyModel) -> Iterator[Ranks]:
    config = RunnerConfig(
        model=str(tiny.path),
        device="cpu",
        tensor_parallel_size=2,
        num_threads=1,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=MAX_MODEL_LEN,
        swap_space_gib=0.01,
    )
    executor = Executor(config, log_level="warning")
    executor.start(120)
    try:
        yield Ranks(executor)
    finally:
        executor.shutdown()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_on_two_ranks(tiny, ranks, mode):
    loop = Loop(
        ranks,
        SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            preemption_mode=mode,
            watermark=0.0,
        ),
        CacheConfig(num_blocks=NUM_BLOCKS, num_host_blocks=32 if mode == "swap" else 0),
    )
    tokens = loop.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    assert [tokens[i] for i in range(len(PROMPTS))] == tiny.references
    assert loop.scheduler.load().num_preemptions > 0


def test_drafts_on_two_ranks(tiny, ranks):
    """Wrong drafts are turned down alike by all: each rank looks at what rank 0 has sampled."""
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=16, max_num_batched_tokens=256, async_depth=0,
        num_speculative_tokens=4, watermark=0.0,
    )  # fmt: skip
    reciter = Reciter(dict(enumerate(tiny.references)), 1)
    loop = Loop(ranks, config, CacheConfig(num_blocks=NUM_BLOCKS), reciter)
    tokens = loop.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    assert [tokens[i] for i in range(len(PROMPTS))] == tiny.references
    load = loop.scheduler.load()
    assert 0 < load.num_accepted_tokens < load.num_draft_tokens and load.num_preemptions > 0
