"""A model of a few thousand random weights, in a folder as a worker loads it; the same weights in each worker."""

import json
from pathlib import Path

from tests.fakes import tokenizer as toys

ARGUMENTS = ("--load-format", "dummy", "--num-threads", "1")
"""With which a worker serves it."""


def write_tiny_model(folder: Path, max_model_len: int = 4096) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = toys.byte_level()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in toys.files(tokenizer).items():
        (folder / name).write_bytes(content)
    return folder
