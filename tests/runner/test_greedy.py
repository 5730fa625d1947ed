"""Tokens through the paged cache: greedy ones equal transformers', seeded ones depend on nothing but the request."""

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.runner.conftest import greedy_reference, make_driver, random_prompt
from worker.core.params import SamplingParams


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_batch_of_different_lengths_for_64_steps(tiny: tuple[Path, LlamaForCausalLM], backend: str) -> None:
    path, model = tiny
    driver = make_driver(path, kernel_backend=backend)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 16, 33, 70)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=63)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 64)


SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=42)


def seeded_alone(path: Path, steps: int) -> list[int]:
    driver = make_driver(path)
    seq = driver.add(random_prompt(9, 1), SEEDED)
    driver.prefill(seq)
    driver.decode(seq, steps=steps - 1)
    return seq.output


def test_seeded_request_is_the_same_in_a_batch_and_in_another_slot(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    others = [driver.add(random_prompt(n, n), SamplingParams(seed=n)) for n in (3, 4, 5)]
    seq = driver.add(random_prompt(9, 1), SEEDED)
    driver.prefill(*others, seq)
    driver.decode(seq, *others, steps=31)
    assert seq.output == seeded_alone(tiny[0], 32)


def test_seeded_request_is_the_same_after_preemption(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    seq = driver.add(random_prompt(9, 1), SEEDED)
    driver.prefill(seq)
    driver.decode(seq, steps=10)
    seq.blocks, seq.num_computed, seq.bound = [], 0, False
    seq.slot = 5
    driver.prefill(seq)
    driver.decode(seq, steps=20)
    assert seq.output == seeded_alone(tiny[0], 32)


def test_equal_prompts_with_different_seeds_differ(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    seqs = [driver.add(random_prompt(9, 1), SamplingParams(seed=seed)) for seed in (1, 2)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=15)
    assert seqs[0].output != seqs[1].output
