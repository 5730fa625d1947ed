"""Corners of the matrix on a real model: greedy tokens of SmolLM2 equal transformers' in float32."""

import json

import pytest

from tests.data.greedy_reference import FILE
from tests.engine.loop import Loop, make_sequence
from tests.engine.reciter import Reciter
from worker.core.config import CacheConfig, SchedulerConfig
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

NUM_TOKENS = 24
CASES = [json.loads(FILE.read_text())["cases"][i] for i in (0, 1, 7, 9, 13, 17)]


@pytest.mark.parametrize(
    ("block_size", "policy", "depth", "prefix", "mode", "chunk", "num_drafts"),
    [
        (1, "chunked", 0, "radix", "swap", 16, 3),
        (16, "prefill_first", 1, "off", "recompute", 0, 0),
        (32, "chunked", 1, "hash", "recompute", 32, 0),
    ],
)
def test_greedy_tokens(block_size, policy, depth, prefix, mode, chunk, num_drafts):
    runner, info = build_runner(
        RunnerConfig(
            device="cpu",
            quantization="none",
            block_size=block_size,
            num_blocks=192 // block_size,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=192,
            swap_space_gib=0.1,
        ),
        Group(),
    )
    loop = Loop(
        runner,
        SchedulerConfig(
            max_model_len=192,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            scheduling_policy=policy,
            async_depth=depth,
            preemption_mode=mode,
            max_prefill_chunk=chunk,
            num_speculative_tokens=num_drafts,
            watermark=0.0,
        ),
        CacheConfig(
            num_blocks=info.num_blocks,
            block_size=block_size,
            num_host_blocks=info.num_host_blocks if mode == "swap" else 0,
            enable_prefix_caching=prefix != "off",
            prefix_index="hash" if prefix == "off" else prefix,
        ),
        Reciter({i: case["tokens"] for i, case in enumerate(CASES)}, 1) if num_drafts else None,
    )
    tokens = loop.run(*(make_sequence(i, case["prompt"], NUM_TOKENS) for i, case in enumerate(CASES)))
    assert [tokens[i] for i in range(len(CASES))] == [case["tokens"][:NUM_TOKENS] for case in CASES]
    load = loop.scheduler.load()
    assert load.num_preemptions > 0
    assert (0 < load.num_accepted_tokens < load.num_draft_tokens) == (num_drafts > 0)
