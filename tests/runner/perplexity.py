"""How well SmolLM2 predicts a text that the tests bring along."""

import math
from pathlib import Path

from tokenizers import Tokenizer

from tests.runner.conftest import make_driver
from worker.core.params import SamplingParams
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files

TEXT = Path(__file__).parents[1] / "data" / "prose.txt"


def prose_perplexity(**options: object) -> float:
    """With these settings of the runner."""
    tokenizer = Tokenizer.from_str(load_tokenizer_files(resolve_model("smollm2")).files["tokenizer.json"].decode())
    tokens = tokenizer.encode(TEXT.read_text()).ids
    driver = make_driver("smollm2", num_blocks=128, **options)
    output = driver.prefill(driver.add(tokens, SamplingParams(temperature=0.0, num_prompt_logprobs=0)))
    logprobs = [entry[0][1] for entry in output.prompt_logprobs[0]]
    assert len(logprobs) == len(tokens) - 1
    return math.exp(-sum(logprobs) / len(logprobs))
