"""Padding and dummy steps live on the spare slot and the spare block: nobody's blocks, slots or tokens change."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runner.conftest import greedy_reference, make_driver, random_prompt
from tests.runner.driver import Driver, cache_of
from worker.runner.prepare import StepPreparer
from worker.runner.probe import dummy_batch, largest_batch
from worker.runner.staging import Staging

pytestmark = pytest.mark.usefixtures("inference_mode")


def padded_driver(path: Path, *sizes: int) -> Driver:
    """As a runner with captured graphs would run uniform steps."""
    driver = make_driver(path)
    parts = driver.runner._parts
    padded = StepPreparer(parts.slots, parts.preparer.buffers, parts.kernels, 16, uniform_sizes=sizes)
    object.__setattr__(parts, "preparer", padded)
    for cache in cache_of(driver.runner):
        cache.zero_()
    return driver


def sums(driver: Driver, blocks: list[int], slots: list[int]) -> list[Tensor]:
    tables = driver.runner._parts.slots.tables
    caches = [cache[blocks].double().sum((1, 2, 3, 4)) for cache in cache_of(driver.runner)]
    return [*caches, tables.tokens[slots].clone(), tables.lengths[slots].clone(), tables.block_tables[slots].clone()]


def test_a_padded_step_writes_its_rows_alone(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    path, model = tiny
    driver = padded_driver(path, 2, 4, 8)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20, 9)]
    driver.prefill(*seqs)
    outside = [block for block in range(64) if all(block not in seq.blocks for seq in seqs)]
    slots = list(range(3, 16))
    before = sums(driver, outside, slots)
    driver.decode(*seqs, steps=9)
    grown = {block for seq in seqs for block in seq.blocks}
    for old, new in zip(before, sums(driver, outside, slots), strict=True):
        kept = [i for i, block in enumerate(outside) if block not in grown] if len(old) == len(outside) else slice(None)
        assert torch.equal(old[kept], new[kept])
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 10)


@pytest.mark.parametrize("num_tokens", [1, 16, 200])
def test_a_dummy_step_between_a_sequences_steps_changes_nothing(
    tiny: tuple[Path, LlamaForCausalLM], num_tokens: int
) -> None:
    path, model = tiny
    driver = make_driver(path)
    for cache in cache_of(driver.runner):
        cache.zero_()
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20)]
    driver.prefill(*seqs)
    for _ in range(6):
        before = sums(driver, list(range(64)), list(range(16)))
        driver.runner.execute(dummy_batch(num_tokens, 16, max_model_len=256))
        for old, new in zip(before, sums(driver, list(range(64)), list(range(16))), strict=True):
            assert torch.equal(old, new)
        driver.decode(*seqs)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 7)


def test_the_largest_step_asks_for_all_that_sampling_can_do(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """Its memory bounds what any step takes; it is measured before there is a cache."""
    driver = make_driver(tiny[0])
    output = driver.runner.execute(largest_batch(40, 16, max_model_len=256))
    assert not output.errors and all(len(output.logprobs[row][0]) == 1 + 20 for row in range(16))


def test_the_largest_step_has_logits_for_every_draft(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    pending = driver.runner.submit(largest_batch(40, 16, max_model_len=256, num_drafts=2))
    # 8 rows of 2 tokens, 8 of 3.
    assert pending.token_ids.shape == (40,) and pending.num_new.shape == (16,)
    assert not pending.result().errors
    driver.runner.execute(dummy_batch(1, 16, max_model_len=256))


def test_rows_are_sent_to_the_device_when_they_change(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tiny
    driver = padded_driver(path, 2, 4)
    sent: list[list[int]] = []
    copy = Staging.copy

    def noted(self: Staging, values: list[int], into: Tensor) -> None:
        sent.append(values)
        copy(self, values, into)

    monkeypatch.setattr(Staging, "copy", noted)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20, 9)]
    driver.prefill(*seqs)
    first, second, third = seqs
    driver.decode(*seqs, steps=3)
    driver.decode(first, third, steps=2)
    driver.runner._parts.preparer.prepare_padding()
    driver.decode(first, third, steps=2)
    driver.decode(third, first)
    driver.decode(*seqs)
    a, b, c = (seq.slot for seq in seqs)
    spare = driver.runner._parts.slots.spare_slot
    assert sent == [[a, b, c, spare], [a, c], [a, c], [c, a], [a, b, c, spare]]
    for seq, steps in ((first, 9), (second, 4), (third, 9)):
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 1 + steps)
