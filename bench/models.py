"""Models of real sizes without real weights: a folder with a config.json and a tokenizer, and safetensors if asked for.

`python -m bench.models qwen3-8b FOLDER` writes the weights, too (16 GB, random); on a GPU in a few seconds.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

CONFIGS: dict[str, dict[str, object]] = {
    "qwen3-8b": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
    },
    "small-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 65536, "tie_word_embeddings": False,
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 256, "vocab_size": 65536, "tie_word_embeddings": False,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
    },
    "tiny": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 256, "vocab_size": 65536, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LAYERS_PER_FILE = 6
GROUP = 128
QUANTIZED: dict[str, dict[str, object]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
        }}},
    },
}  # fmt: skip
"""float8 in square blocks; 4 bits in groups of inputs (W4A16)."""


def write_model(name: str, folder: Path, *, weights: bool = False, stored: str | None = None) -> Path:
    """The folder of the model, without weights unless asked for. `stored`: in which of `QUANTIZED`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | CONFIGS[name]
    if stored is not None:
        config["quantization_config"] = QUANTIZED[stored]
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer(int(str(config["vocab_size"]))).save(str(folder / "tokenizer.json"))
    if weights:
        write_weights(folder, config, stored)
    return folder


def tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level: two ends, a token for each byte, and made-up words up to the model's vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<begin>", "<end>", *letters]
    names += [f"\u0120word{i}" for i in range(vocab_size - len(names))]
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in names[:2]])
    return made


def write_weights(folder: Path, config: dict[str, object], stored: str | None) -> None:
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    index: dict[str, str] = {}
    num_layers = int(str(config["num_hidden_layers"]))
    for number, first in enumerate(range(-1, num_layers, LAYERS_PER_FILE)):
        shapes = dict(shapes_of(config, range(first, min(first + LAYERS_PER_FILE, num_layers))))
        tensors = {name: random_weight(shape, device) for name, shape in shapes.items()}
        if stored is not None:
            tensors = {part: x for name, tensor in tensors.items() for part, x in quantized(name, tensor, stored)}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def random_weight(shape: tuple[int, ...], device: str) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()


def quantized(name: str, weight: Tensor, stored: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a linear layer, of a usual size; others as they are."""
    if not name.endswith("_proj.weight"):
        yield name, weight
    elif stored == "fp8":
        yield name, (weight * 100).to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", torch.full([-(-size // GROUP) for size in weight.shape], 0.01)
    else:
        out, inputs = weight.shape
        yield f"{name}_packed", torch.randint(-(2**31), 2**31, (out, inputs // 8), dtype=torch.int32)
        yield f"{name}_scale", torch.full((out, inputs // GROUP), 0.004, dtype=torch.bfloat16)
        yield f"{name}_shape", torch.tensor(weight.shape)


def shapes_of(config: dict[str, object], layers: range) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of these layers; −1 is what stands outside of them."""
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    hidden, heads, kv_heads, dim, inner, vocabulary = (int(str(config[key])) for key in keys)
    for layer in layers:
        if layer < 0:
            yield "model.embed_tokens.weight", (vocabulary, hidden)
            yield "model.norm.weight", (hidden,)
            if not config["tie_word_embeddings"]:
                yield "lm_head.weight", (vocabulary, hidden)
            continue
        of = f"model.layers.{layer}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{of}.self_attn.{name}_proj.weight", (rows * dim, hidden)
        yield f"{of}.self_attn.o_proj.weight", (hidden, heads * dim)
        yield f"{of}.self_attn.q_norm.weight", (dim,)
        yield f"{of}.self_attn.k_norm.weight", (dim,)
        if "num_experts" in config:
            yield from expert_shapes(config, f"{of}.mlp")
        else:
            yield from mlp_shapes(f"{of}.mlp", inner, hidden)
        yield f"{of}.input_layernorm.weight", (hidden,)
        yield f"{of}.post_attention_layernorm.weight", (hidden,)


def expert_shapes(config: dict[str, object], of: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, number, inner = (int(str(config[key])) for key in ("hidden_size", "num_experts", "moe_intermediate_size"))
    yield f"{of}.gate.weight", (number, hidden)
    for expert in range(number):
        yield from mlp_shapes(f"{of}.experts.{expert}", inner, hidden)


def mlp_shapes(of: str, inner: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{of}.gate_proj.weight", (inner, hidden)
    yield f"{of}.up_proj.weight", (inner, hidden)
    yield f"{of}.down_proj.weight", (hidden, inner)


def num_bytes_read(name: str) -> int:
    """Of weights in bfloat16, for each token: all but the table of embeddings, unless it is the head, too. Of a model
    without experts."""
    config = COMMON | CONFIGS[name]
    shapes = dict(shapes_of(config, range(-1, int(str(config["num_hidden_layers"])))))
    if not config["tie_word_embeddings"]:
        del shapes["model.embed_tokens.weight"]
    return 2 * sum(map(math.prod, shapes.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(CONFIGS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(arguments.name, arguments.folder, weights=True)
