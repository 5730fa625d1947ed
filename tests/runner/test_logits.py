"""Logits within 1e-4 of transformers, through the paged cache, however the work is cut up."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runner.conftest import make_driver, random_prompt, save_llama
from tests.runner.driver import Seq
from tests.runner.logits import assert_logits, capture_logits, reference
from worker.core.params import SamplingParams


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_prefill_then_decode_in_a_batch_of_different_lengths(
    tiny: tuple[Path, LlamaForCausalLM], block_size: int
) -> None:
    path, model = tiny
    driver = make_driver(path, block_size=block_size, num_blocks=512 // block_size)
    seen = capture_logits(driver)
    # Feed known tokens in place of sampled ones, so that every position can be checked.
    texts = [random_prompt(n + 12, n) for n in (2, 15, 16, 17, 50)]
    seqs = [driver.add(text[:-12]) for text in texts]
    driver.prefill(*seqs)
    for seq, row in zip(seqs, seen[-1], strict=True):
        assert_logits(row, model, seq.tokens[: seq.num_prompt])
    for step in range(12):
        for seq, text in zip(seqs, texts, strict=True):
            seq.feed(text[seq.num_prompt + step])
        driver.decode(*seqs)
        for row, text in zip(seen[-1], texts, strict=True):
            assert_logits(row, model, text[: len(text) - 12 + step + 1])


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(tiny: tuple[Path, LlamaForCausalLM], chunk: int, block_size: int) -> None:
    path, model = tiny
    driver = make_driver(path, block_size=block_size, num_blocks=256 // block_size)
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(45, 3))
    while seq.num_computed < seq.num_prompt:
        driver.run([(seq, min(chunk, seq.num_prompt - seq.num_computed))])
    assert len(seen) == 1, "only the last chunk needs the head"
    assert_logits(seen[0][0], model, seq.tokens[:-1])


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_prefix_hit_reads_another_sequences_blocks(tiny: tuple[Path, LlamaForCausalLM], block_size: int) -> None:
    path, model = tiny
    driver = make_driver(path, block_size=block_size, num_blocks=256 // block_size)
    seen = capture_logits(driver)
    shared = random_prompt(40, 5)
    first = driver.add(shared + random_prompt(9, 6))
    driver.prefill(first)
    second = driver.add(shared + random_prompt(11, 7), prefix=first)
    assert second.num_computed == 40 // block_size * block_size
    driver.prefill(second)
    assert_logits(seen[-1][0], model, second.tokens[:-1])


def test_decodes_between_chunks_in_one_batch(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """Rows with one token stand between longer ones; results come back in the batch's order."""
    path, model = tiny
    driver = make_driver(path)
    a, b, c = (driver.add(random_prompt(n, n)) for n in (20, 30, 25))
    driver.prefill(b)
    driver.run([(a, 8), (b, 1), (c, 25)])
    driver.run([(c, 1), (a, 12), (b, 1)])
    for seq, steps in ((a, 1), (b, 3), (c, 2)):
        assert len(seq.output) == steps
        for end in range(seq.num_prompt, len(seq.tokens)):
            assert seq.tokens[end] == reference(model, seq.tokens[:end]).argmax()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "multi-head": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "wide heads": {"head_dim": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_llama(tmp_path: Path, variant: str) -> None:
    model = save_llama(tmp_path, **VARIANTS[variant])
    if variant == "biases":
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path)
    driver = make_driver(tmp_path)
    seen = capture_logits(driver)
    seqs: list[Seq] = [driver.add(random_prompt(n, n)) for n in (70, 12)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=3)
    for seq, row in zip(seqs, seen[-1], strict=True):
        assert_logits(row, model, seq.tokens[:-1])


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_lower_precision_stays_close(tiny: tuple[Path, LlamaForCausalLM], dtype: str) -> None:
    path, model = tiny
    driver = make_driver(path, dtype=dtype)
    seen = capture_logits(driver)
    seqs = [driver.add(random_prompt(n, n)) for n in (20, 33)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=2)
    for seq, row in zip(seqs, seen[-1], strict=True):
        expected = reference(model, seq.tokens[:-1])
        assert (row.float() - expected).norm() / expected.norm() < 0.05


def test_the_last_layer_computes_only_the_tokens_that_are_wanted(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """The last token of each row; all of them where a row asks for its prompt's log probabilities."""
    path, _ = tiny
    driver = make_driver(path)
    seen: list[list[int]] = [[], []]
    layers = driver.runner._model.model.layers  # type: ignore[union-attr]
    for layer, numbers in zip((layers[0], layers[-1]), seen, strict=True):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args, numbers=numbers: numbers.append(len(args[0])))
    a, b = driver.add(random_prompt(20, 1)), driver.add(random_prompt(30, 2))
    driver.run([(a, 8), (b, 30)])
    driver.run([(a, 12), (b, 1)])
    driver.run([(a, 1), (b, 1)])
    asking = driver.add(random_prompt(9, 3), SamplingParams(temperature=0.0, num_prompt_logprobs=0))
    driver.run([(asking, 9), (a, 1)])
    assert seen == [[38, 13, 2, 10], [2, 2, 2, 10]]
