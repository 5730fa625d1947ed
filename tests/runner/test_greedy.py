"""Greedy tokens through the paged cache equal transformers'."""

from pathlib import Path

from transformers import LlamaForCausalLM

from tests.runner.conftest import greedy_reference, make_driver, random_prompt


def test_batch_of_different_lengths_for_64_steps(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    path, model = tiny
    driver = make_driver(path)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 16, 33, 70)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=63)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 64)
