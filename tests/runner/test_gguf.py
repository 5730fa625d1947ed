"""GGUF files: metadata read as llama.cpp reads them, tensors, and what is wrong with a file."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.runner.conftest import TINY, make_driver, random_prompt, save_llama
from tests.runner.gguf_files import write_gguf
from tests.runner.logits import assert_logits, capture_logits
from worker.loader.config import ModelConfig
from worker.loader.errors import ModelConfigError, UnknownArchitectureError, WeightsError
from worker.loader.gguf.config import config_from_gguf
from worker.loader.gguf.file import GGUFFile, GGUFTensor, read_gguf
from worker.loader.gguf.types import SIZES, TensorType
from worker.loader.load_config import load_model_config
from worker.loader.rope import RopeConfig, YarnScaling
from worker.loader.source import resolve_model

TOKENS = ["<s>", "</s>", "<|eot_id|>", "<|im_end|>", "a", "<|eom_id|>"]


def read(num_tokens: int = 6, tensors: dict[str, GGUFTensor] | None = None, **changes: Any) -> ModelConfig:
    """A file of 6 tokens and heads of 8; names in `changes` without "llama.", "__" for dots."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": TOKENS,
    }
    metadata |= {name if name.startswith("tokenizer.") else f"llama.{name}": value for name, value in changes.items()}
    embedding = {"token_embd.weight": plain_tensor(num_tokens, 32)}
    return config_from_gguf(GGUFFile(metadata, embedding | (tensors or {})), "a.gguf")


def plain_tensor(*shape: int) -> GGUFTensor:
    values = np.ones((max(1, int(np.prod(shape[:-1]))), shape[-1]), np.float32)
    return GGUFTensor(shape, TensorType.F32, values.data.cast("B"))


# --- rotary position embedding: a factor means what the type beside it says


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"scaling.type": "none", "scaling.factor": 4.0}, RopeConfig(10000.0)),
        ({"scaling.factor": 4.0}, RopeConfig(10000.0, 4.0)),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, RopeConfig(10000.0, 4.0)),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, RopeConfig(10000.0)),
        ({"scale_linear": 4.0}, RopeConfig(10000.0, 4.0)),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, RopeConfig(10000.0, 2.0)),
        ({"scaling.attn_factor": 1.5}, RopeConfig(10000.0, attention_factor=1.5)),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64, "freq_base": 5e5},
            RopeConfig(5e5, yarn=YarnScaling(4.0, 64, 32.0, 1.0), attention_factor=1.1386294361119891),
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 2.0, "scaling.yarn_beta_fast": 8.0},
            RopeConfig(10000.0, yarn=YarnScaling(4.0, 256, 8.0, 1.0), attention_factor=2.2772588722239782),
        ),
        ({"dimension_count": 8}, RopeConfig(10000.0)),
    ],
)
def test_rope(fields: dict[str, Any], expected: RopeConfig) -> None:
    assert read(**{f"rope.{key}": value for key, value in fields.items()}).rope == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope.scaling.type", "longrope", "is 'longrope'; one of none, linear, yarn"),
        ("rope.scaling.factor", -1.0, "is -1.0; a number above 0, or 0,"),
        ("rope.dimension_count", 4, "is 4; nothing but 8 is supported"),
        ("rope.freq_base", 0.0, "is 0.0; a number above 1"),
        ("rope.scaling.yarn_log_multiplier", 0.1, "is 0.1; nothing but 0"),
        ("expert_count", 8, "is 8; nothing but 0"),
        ("attention.head_count", [4, 4], "is [4, 4]; a whole number"),
        ("attention.head_count_kv", 3, "is 3; a divisor of the 4"),
        ("attention.value_length", 16, "is 16; nothing but 8"),
        ("attention.sliding_window", 1024, "is 1024; nothing but 0"),
        ("logit_scale", 0.5, "is 0.5; fields that are not known here"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(**{key: value})
    assert f"a.gguf: llama.{key} {message}" in str(caught.value)


def test_rope_divisors() -> None:
    assert read(tensors={"rope_freqs.weight": plain_tensor(4)}).rope.frequency_divisors == (1.0,) * 4
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight: its shape is \(5,\), the model expects \(4,\)"):
        read(tensors={"rope_freqs.weight": plain_tensor(5)})
    halves = GGUFTensor((4,), TensorType.F16, memoryview(bytes(8)))
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight is stored as F16; F32 is needed"):
        read(tensors={"rope_freqs.weight": halves})


def test_types_of_tensors_are_those_of_the_package() -> None:
    for kind in GGMLQuantizationType:
        assert TensorType[kind.name] == kind and SIZES[TensorType(kind)] == GGML_QUANT_SIZES[kind]


# --- tokens


def test_every_token_that_ends_a_turn_ends_generation() -> None:
    """Whether a key names it or its text does."""
    assert read(**{"tokenizer.ggml.eos_token_id": 1}).eos_token_ids == (1, 2, 3, 5)
    keys = {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 5}
    assert read(**keys, **{"tokenizer.ggml.tokens": ["a"] * 6}).eos_token_ids == (4, 0, 5)


def test_ids_beyond_the_vocabulary_are_left_out_and_named() -> None:
    config = read(**{"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.tokens": []})
    assert config.eos_token_ids == (4,)
    assert config.remarks == ("a.gguf: tokenizer.ggml.eot_token_id names 6, beyond the vocabulary of 6: left out",)


@pytest.mark.parametrize("vocab_size", [None, 5, 6, 7])
def test_the_embedding_tells_how_many_tokens_there_are(vocab_size: int | None) -> None:
    assert read(vocab_size=vocab_size).vocab_size == 6


def test_a_file_without_an_embedding_says_so() -> None:
    with pytest.raises(WeightsError, match=r"no tensor token_embd\.weight"):
        config_from_gguf(GGUFFile({"general.architecture": "llama", "llama.embedding_length": 8,
                                   "llama.attention.head_count": 2}, {}), "a.gguf")  # fmt: skip


# --- files


def test_gguf_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path, tiny: tuple[Path, LlamaForCausalLM]
) -> None:
    """Also with a `vocab_size` that is one too small."""
    write_gguf(tmp_path / "tiny.gguf", tiny[1], **{"llama.vocab_size": 130})
    driver = make_driver(tmp_path / "tiny.gguf")
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(30, 1))
    driver.prefill(seq)
    assert_logits(seen[0][0], tiny[1], seq.tokens[:-1])


def test_qwen3_in_a_gguf_file(tmp_path: Path) -> None:
    """Norms of heads; rows of queries and keys are as Hugging Face has them."""
    torch.manual_seed(0)
    assert_same_logits(tmp_path, Qwen3ForCausalLM(Qwen3Config(**(TINY | {"head_dim": 16}))))


def test_qwen2_in_a_gguf_file(tmp_path: Path) -> None:
    """Biases of queries, keys and values."""
    torch.manual_seed(0)
    assert_same_logits(tmp_path, Qwen2ForCausalLM(Qwen2Config(**TINY)))


def test_gemma3_in_a_gguf_file(tmp_path: Path) -> None:
    """Norms are stored plus 1; every sixth layer sees beyond the window, with scaled angles."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **TINY | {"num_hidden_layers": 7, "head_dim": 16}, query_pre_attn_scalar=16, sliding_window=12,
        rope_parameters=ropes,
    )  # fmt: skip
    keys = {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
            "attention.sliding_window": 12}  # fmt: skip
    assert_same_logits(tmp_path, Gemma3ForCausalLM(config), **{f"gemma3.{key}": value for key, value in keys.items()})


def assert_same_logits(tmp_path: Path, model: PreTrainedModel, **changes: Any) -> None:
    """With norms and biases that are not what they begin as."""
    model = model.float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    write_gguf(tmp_path / "a.gguf", model, **changes)
    driver = make_driver(tmp_path / "a.gguf")
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(30, 1))
    driver.prefill(seq)
    assert_logits(seen[0][0], model, seq.tokens[:-1])


def test_yarn_in_a_gguf_file(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = save_llama(tmp_path, rope_parameters=rope)
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    write_gguf(tmp_path / "a.gguf", model, **{f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    driver = make_driver(tmp_path / "a.gguf")
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(100, 1))
    driver.prefill(seq)
    assert_logits(seen[0][0], model, seq.tokens[:-1])


def test_gguf_of_unknown_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitectureError, match=r"'mamba'.*known: gemma3, .*--model-impl transformers"):
        load_model_config(resolve_model(str(tmp_path / "a.gguf")))


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def header(num_tensors: int, num_fields: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + rest


def tensor_entry(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
DAMAGED = {
    "empty": b"",
    "magic alone": b"GGUF",
    "no magic": b"nonsense" * 10,
    "future version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "fields that are not there": header(0, 5, b""),
    "countless fields": header(0, 2**63, b""),
    "countless tensors": header(2**63, 0, b""),
    "endless key": header(0, 1, struct.pack("<Q", 2**64 - 1) + b"a" * 16),
    "key that is no text": header(0, 1, struct.pack("<Q", 1) + b"\xff" + b"\0" * 16),
    "unknown type of value": header(0, 1, text("a") + struct.pack("<IQ", 99, 0)),
    "endless array": header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2**62)),
    "endless array of texts": header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**62)),
    "arrays in arrays": header(0, 1, text("a") + NESTED),
    "field twice": header(0, 2, (text("a") + struct.pack("<II", 4, 0)) * 2),
    "alignment 0": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
    "alignment in words": header(0, 1, text("general.alignment") + struct.pack("<I", 8) + text("wide")),
    "tensor of no dimensions": header(1, 0, tensor_entry("t", [])),
    "tensor of many dimensions": header(1, 0, tensor_entry("t", [1] * 40)),
    "tensor beyond the end": header(1, 0, tensor_entry("t", [4, 4])),
    "tensor larger than memory": header(1, 0, tensor_entry("t", [2**40, 2**40])),
    "tensor far away": header(1, 0, tensor_entry("t", [1], offset=2**63)),
    "unknown type of tensor": header(1, 0, tensor_entry("t", [1], kind=4)),
    "part of a block": header(1, 0, tensor_entry("t", [33], kind=8) + b"\0" * 512),
    "tensor twice": header(2, 0, tensor_entry("t", [1]) * 2 + b"\0" * 64),
}


@pytest.mark.parametrize("with_texts", [True, False])
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_gguf_file(tmp_path: Path, name: str, with_texts: bool) -> None:
    (tmp_path / "a.gguf").write_bytes(DAMAGED[name])
    with pytest.raises(WeightsError):
        read_gguf(tmp_path / "a.gguf", with_texts=with_texts)


def test_truncated_gguf_tensors(tmp_path: Path, tiny: tuple[Path, LlamaForCausalLM]) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny[1])
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(WeightsError, match=r"not a readable GGUF file: tensor .* reaches beyond the end"):
        read_gguf(file)


def test_types_in_the_embedded_model() -> None:
    tensors = read_gguf(resolve_model("smollm2").path).tensors
    assert tensors["token_embd.weight"].type is TensorType.Q8_0
    assert tensors["token_embd.weight"].shape == (49152, 576)
