"""Blocks that several sequences see: forks, equal prompts, resumption, failures."""

import pytest
import torch

from tests.engine.conftest import NUM_TOKENS, PROMPTS
from tests.engine.loop import make_sequence
from tests.runner.driver import cache_of
from worker.core.params import SamplingParams
from worker.core.stopping import FinishReason


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(("length", "num_copied_blocks"), [(1, 0), (31, 2), (32, 2), (33, 2)])
def test_forks_write_into_copies(tiny, block_size, length, num_copied_blocks):
    """Each of two more members computes the prompt's last token again, in a copy of its block."""
    prompt = PROMPTS[3][:length]
    members = [
        make_sequence(i, prompt, NUM_TOKENS, SamplingParams(seed=i), parent_id=1 if i > 1 else None, index=i - 1)
        for i in (1, 2, 3)
    ]
    loop = tiny.loop(block_size)
    tokens = loop.run(members)
    alone = [make_sequence(i, prompt, NUM_TOKENS, SamplingParams(seed=i)) for i in (1, 2, 3)]
    assert [tokens[seq.id] for seq in alone] == [tiny.loop(16).run(seq)[seq.id] for seq in alone]
    assert loop.num_copied_blocks == num_copied_blocks


@pytest.mark.parametrize("prefix", ["hash", "radix"])
def test_equal_prompts_in_one_step(tiny, prefix):
    """Case 5: they do not disturb each other, and whoever comes later hits."""
    prompt = PROMPTS[3]
    loop = tiny.loop(16, prefix=prefix)
    tokens = loop.run(*(make_sequence(i, prompt, NUM_TOKENS) for i in range(3)))
    tokens = loop.run(make_sequence(3, prompt, NUM_TOKENS))
    assert [tokens[i] for i in range(4)] == [tiny.references[3]] * 4
    assert loop.ended[3].num_cached_tokens == 32


@pytest.mark.parametrize("prefix", ["hash", "radix"])
def test_a_resumed_sequence_hits_its_own_blocks(tiny, prefix):
    """Case 4: tokens scheduled after preemption are those that the cache does not have. That is no hit (A7)."""
    scheduled = {}
    for kind in ("off", prefix):
        loop = tiny.loop(16, num_tokens_in_cache=96, prefix=kind, watermark=0.0)
        tokens = loop.run(*(make_sequence(i, PROMPTS[i], NUM_TOKENS) for i in (2, 3, 1)))
        assert tokens == {i: tiny.references[i] for i in (2, 3, 1)}
        assert loop.scheduler.load().num_preemptions > 0
        assert loop.scheduler.load().num_prefix_hits == 0
        scheduled[kind] = loop.num_scheduled_tokens
    assert (scheduled["off"] - scheduled[prefix]) % 16 == 0
    assert scheduled[prefix] < scheduled["off"]


@pytest.mark.parametrize("prefix", ["hash", "radix"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_sequence_fails_alone_and_nothing_of_it_is_hit(tiny, prefix, depth):
    """Case 42."""
    loop = tiny.loop(16, prefix=prefix, async_depth=depth)
    _, values = cache_of(loop.runner)

    @torch.inference_mode()
    def poison() -> None:
        failing = loop.scheduler._state.sequences.get(1)
        if failing is not None and failing.num_generated_tokens == 5:
            values[failing.block_table[0], 0] = torch.nan

    loop.run(*(make_sequence(i, PROMPTS[i + 2], NUM_TOKENS) for i in range(3)), before_step=poison)
    failed = loop.ended[1]
    assert (failed.finish_reason, failed.detail) == (FinishReason.ERROR, "the model's output is not finite")
    assert (loop.tokens[0], loop.tokens[2]) == (tiny.references[2], tiny.references[4])
    tokens = loop.run(make_sequence(3, PROMPTS[3], NUM_TOKENS))
    assert tokens[3] == tiny.references[3]
    assert loop.ended[3].num_cached_tokens == 0
