"""Each family at a tiny configuration against `transformers`: logits within 1e-4 through the paged cache, in mixed
batches, chunks and single tokens, and greedy tokens of 64 steps."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.runner.conftest import TINY, greedy_reference, make_driver, random_prompt
from tests.runner.test_logits import assert_logits, capture_logits

FAMILIES = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**(TINY | {"sliding_window": None}))),
    "mistral-untied": lambda: MistralForCausalLM(
        MistralConfig(**(TINY | {"sliding_window": None, "tie_word_embeddings": False}))
    ),
    # Wide enough for the kernels that a CPU has of its own.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**(TINY | {"head_dim": 16, "intermediate_size": 96}))),
    "qwen3-bias": lambda: Qwen3ForCausalLM(Qwen3Config(**(TINY | {"attention_bias": True}))),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    torch.manual_seed(0)
    model = FAMILIES[request.param]().float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path, model


def test_logits_equal_transformers(family: tuple[Path, PreTrainedModel]) -> None:
    path, model = family
    driver = make_driver(path)
    seen = capture_logits(driver)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 16, 33)]
    driver.prefill(*seqs[:2])
    driver.run([(seqs[0], 1), (seqs[2], 20)])
    driver.run([(seqs[2], 13), (seqs[1], 1)])
    for row, seq in zip(seen[-1], (seqs[1], seqs[2]), strict=True):
        assert_logits(row, model, seq.tokens[:-1])


def test_greedy_tokens_equal_transformers(family: tuple[Path, PreTrainedModel]) -> None:
    path, model = family
    driver = make_driver(path)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 17)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=63)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 64)
