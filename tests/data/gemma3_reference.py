"""Greedy tokens and their logits of Gemma 3 270M by transformers in float32, for tests.

    python -m tests.data.gemma3_reference    writes gemma3_greedy.json beside this file (minutes; needs `make gemma`)

Kept as a file because transformers takes minutes to read this model's GGUF.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files

FILE = Path(__file__).parent / "gemma3_greedy.json"
MODEL = Path(sys.prefix) / "gemma" / "gemma-3-270m-q4_k_m.gguf"
"""Where `make gemma` puts it."""
NUM_TOKENS = 32
PROMPTS = [
    "The capital of Germany is Berlin. The capital of Italy is Rome. The capital of France is",
    "Question: What is the capital of France?\nAnswer:",
    "Water boils at a temperature of",
    "naïve café 漢字 😀 →",
    # Longer than the window of most layers, 512 tokens.
    (FILE.parent / "prose.txt").read_text(),
]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """(the next NUM_TOKENS tokens, past any end-of-sequence token; the logit of each)."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), [step.max().item() for step in out.logits]


def main() -> None:
    tokenizer = Tokenizer.from_buffer(load_tokenizer_files(resolve_model(str(MODEL))).files["tokenizer.json"])
    model = AutoModelForCausalLM.from_pretrained(MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32).eval()
    cases = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        tokens, logits = greedy(model, prompt)
        cases.append({"text": text, "prompt": prompt, "tokens": tokens, "logits": logits})
        print(len(prompt), repr(tokenizer.decode(tokens)))
    versions = {name: version(name) for name in ("torch", "transformers")}
    FILE.write_text(json.dumps({"versions": versions, "cases": cases}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
