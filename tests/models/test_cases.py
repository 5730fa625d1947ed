"""Each family at tiny configurations against `transformers`: logits at every position and greedy tokens, however a text
is cut into steps and whatever the scheduler does."""

import torch

from tests.engine.loop import Loop, make_sequence
from tests.models.cases import VOCABULARY
from tests.models.saved import Saved
from tests.runner.conftest import make_driver, random_prompt
from tests.runner.logits import capture_logits
from worker.core.config import CacheConfig, SchedulerConfig

NUM_TOKENS = 64


def prompt(length: int) -> list[int]:
    return random_prompt(length, length, VOCABULARY)


def test_logits_at_every_position_and_greedy_tokens(saved: Saved) -> None:
    """A text token by token from its first, beside another; both are what `transformers` goes on with."""
    driver = make_driver(saved.path, **saved.options)
    seen = capture_logits(driver)
    seqs = [driver.add(prompt(n)) for n in (1, 16)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=NUM_TOKENS - 1)
    for row, seq in enumerate(seqs):
        saved.assert_greedy(seq.tokens[: seq.num_prompt], seq.output)
        saved.assert_logits(torch.stack([logits[row] for logits in seen]), seq.tokens, seq.num_prompt - 1)


def test_mixed_batches_and_chunks(saved: Saved) -> None:
    driver = make_driver(saved.path, **saved.options)
    seen = capture_logits(driver)
    seqs = [driver.add(prompt(n)) for n in (5, 30, 61)]
    driver.prefill(*seqs[:2])
    driver.run([(seqs[0], 1), (seqs[2], 20)])
    driver.run([(seqs[0], 1), (seqs[2], 33)])
    driver.run([(seqs[1], 1), (seqs[2], 8)])
    again = driver.add(seqs[2].tokens, prefix=seqs[2])
    assert again.num_computed == (0 if driver.num_groups else 48)
    driver.run([(seqs[0], 1), (again, len(again.tokens) - again.num_computed)])
    for rows, of_rows in ((seen[-1], (seqs[0], again)), (seen[-2], (seqs[1], seqs[2]))):
        for row, seq in zip(rows, of_rows, strict=True):
            saved.assert_logits(row[None], seq.tokens, len(seq.tokens) - 2)


def test_prefix_reuse_and_preemption_through_the_scheduler(saved: Saved) -> None:
    """The cache holds less than all sequences need; prompts share beginnings of whole blocks, after which state is kept
    where there is any."""
    driver = make_driver(saved.path, num_blocks=8, max_num_seqs=4, num_state_checkpoints=2, **saved.options)
    scheduler = SchedulerConfig(
        max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_chunk=16, watermark=0.0
    )
    loop = Loop(
        driver.runner,
        scheduler,
        CacheConfig(
            block_size=16, num_blocks=8, num_groups=driver.num_groups, num_checkpoints=2 if driver.num_groups else 0
        ),
    )
    prompts = [prompt(40), prompt(40)[:33] + prompt(7), prompt(9)]
    tokens = loop.run(*(make_sequence(i, p, 32) for i, p in enumerate(prompts)), each_step=1)
    assert loop.scheduler.load().num_preemptions > 0 and loop.scheduler.load().num_prefix_hits > 0
    for number, text in enumerate(prompts):
        saved.assert_greedy(text, tokens[number])
