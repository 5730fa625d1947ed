"""Whatever stands in a model's files, loading works or raises the loader's own error: each field of each file with
values of every kind, and files that are cut, flipped or lie about what is in them."""

import json
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.conftest import save_llama
from tests.runner.gguf_files import metadata_of, tensors_of, write_gguf, write_metadata
from tests.runner.test_gguf_tokenizer import BYTE_LEVEL
from worker.loader.errors import ModelConfigError, ModelError, WeightsError
from worker.loader.load_config import load_model_config
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.loader.tokenizer_files import check_tokenizer_files
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

NESTED: list[Any] = []
for _ in range(100):
    NESTED = [NESTED]
VALUES: list[Any] = [
    None, True, -1, 0, 7, 2**70, 0.5, float("nan"), "text", [], [-1, 2**40], {"a": {"b": 1}}, NESTED
]  # fmt: skip
OPTIONAL = {
    "attention_bias": False, "mlp_bias": False, "rope_scaling": None, "rope_theta": 1e4, "sliding_window": None,
    "use_sliding_window": False, "layer_types": None, "pretraining_tp": 1, "partial_rotary_factor": 1,
    "quantization_config": None, "torch_dtype": "float32", "num_key_value_heads": 2, "pruned_heads": {},
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0, "truncate": True,
    "low_freq_factor": None, "high_freq_factor": None,
}  # fmt: skip


def load(path: Path) -> None:
    """All that a worker does with a model's files."""
    build_runner(RunnerConfig(model=str(path), device="cpu", num_blocks=2, max_model_len=16), Group())
    load_tokenizer(path)


def load_tokenizer(path: Path) -> None:
    check_tokenizer_files(load_tokenizer_files(resolve_model(str(path))).files, 300)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    save_llama(folder, vocab_size=300)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(OPTIONAL | config | {"rope_parameters": ROPE}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.6, "top_k": 5}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<end>", "chat_template": "a"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    load(folder)
    return folder


@pytest.fixture
def folder(valid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(valid, tmp_path / "model"))


def tampered(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each field missing, and with each value; those of objects inside, too."""
    for key, old in fields.items():
        yield {k: v for k, v in fields.items() if k != key}
        for value in VALUES:
            yield fields | {key: value}
        for inner in tampered(old) if isinstance(old, dict) else ():
            yield fields | {key: inner}


def test_every_field_of_the_configuration(folder: Path) -> None:
    """A configuration that says something else and is accepted must fit the weights or be refused by them."""
    file, source = folder / "config.json", resolve_model(str(folder))
    fields = json.loads(file.read_text())
    plain = load_model_config(source)
    num_refused = 0
    for changed in tampered(fields):
        file.write_text(json.dumps(changed))
        try:
            config = load_model_config(source)
        except ModelError as error:
            num_refused += 1
            assert "config.json" in str(error) or "architecture" in str(error)
            continue
        if (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) != (
            plain.hidden_size, plain.num_layers, plain.num_heads, plain.num_kv_heads, plain.head_dim
        ):  # fmt: skip
            with pytest.raises(ModelError):
                load(folder)
    assert num_refused > 300


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_every_field_of_the_other_files(folder: Path, name: str) -> None:
    source = resolve_model(str(folder))
    for changed in tampered(json.loads((folder / name).read_text())):
        (folder / name).write_text(json.dumps(changed))
        with suppress(ModelError):
            assert max(load_model_config(source).eos_token_ids, default=0) < 300
            load_tokenizer(source.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff{}", b"[" * 100_000, b'{"a": 1e999999}', b"nul"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"],
)
def test_a_json_file_that_is_none(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    if content == b'{"a": 1e999999}' and name not in ("config.json", "tokenizer.json"):
        load(folder)
        return
    with pytest.raises(ModelConfigError, match=name):
        load_model_config(resolve_model(str(folder)))
        load_tokenizer(folder)


def test_every_part_of_the_tokenizer(folder: Path) -> None:
    file, source = folder / "tokenizer.json", resolve_model(str(folder))
    fields = json.loads(file.read_text())
    fields["model"]["vocab"] = {"a": 0, "b": 1, "ab": 2}
    fields["model"]["merges"] = [["a", "b"]]
    fields["added_tokens"] = [{"id": 3, "content": "<end>", "special": True, "single_word": False, "lstrip": False,
                               "rstrip": False, "normalized": False}]  # fmt: skip
    for changed in tampered(fields):
        file.write_text(json.dumps(changed))
        with suppress(ModelError):
            load_tokenizer(source.path)


def test_a_tokenizer_that_knows_more_than_the_model(folder: Path) -> None:
    files = load_tokenizer_files(resolve_model(str(folder))).files
    assert check_tokenizer_files(files, 260) is None
    assert check_tokenizer_files(files, 258) == (
        "tokenizer.json knows 2 tokens that the model, with 258, does not; the first is 'ab'. Prompts with one of them "
        "are refused"
    )


def test_a_model_larger_than_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd more about it")

    monkeypatch.setattr("worker.runner.load.create_model", create_model)
    with pytest.raises(WeightsError, match=r"do not fit into the memory of cpu: CUDA .* allocate 9 GiB\.$"):
        load(folder)


# --- safetensors


def write_safetensors(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def test_a_safetensors_header_that_lies(folder: Path) -> None:
    """One entry of it with values of every kind, and the length in front of it."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = "model.norm.weight"
    for entry in tampered({name: header[name]}):
        write_safetensors(file, json.dumps(header | {name: None} | entry).encode(), data)
        if entry != {name: header[name]}:
            with pytest.raises(ModelError):
                load(folder)
    for length in (0, 1, size - 1, size + 1, 2**40, 2**64 - 1):
        write_safetensors(file, whole[8 : 8 + size], data, length)
        with pytest.raises(ModelError):
            load(folder)


def test_safetensors_that_are_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for end in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            load(folder)


def test_every_field_of_the_index(folder: Path) -> None:
    weights = {"model.norm.weight": "model.safetensors"}
    for changed in tampered({"metadata": {"total_size": 1}, "weight_map": weights}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        with suppress(ModelError):
            SafetensorsCheckpoint(folder)


# --- GGUF


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return save_llama(tmp_path_factory.mktemp("twin"), vocab_size=len(BYTE_LEVEL["tokens"]), num_hidden_layers=1)


def gguf_metadata(model: LlamaForCausalLM) -> dict[str, Any]:
    metadata = metadata_of(model) | {f"tokenizer.ggml.{key}": value for key, value in BYTE_LEVEL.items()}
    rope = {"type": "yarn", "factor": 2.0, "original_context_length": 64, "attn_factor": 1.0, "finetuned": True}
    metadata |= {f"llama.rope.scaling.{key}": value for key, value in rope.items()}
    return metadata | {"llama.rope.dimension_count": 8, "tokenizer.chat_template": "a", "general.alignment": 32}


def test_every_field_of_gguf_metadata(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path, metadata, tensors = tmp_path / "a.gguf", gguf_metadata(model), tensors_of(model)
    write_metadata(path, metadata, tensors)
    load(path)
    values = [value for value in VALUES if isinstance(value, bool | str | float) or value in (None, 0, 7)]
    num_refused = 0
    for key in metadata:
        for value in [*values, ["a"], [1, 2]]:
            write_metadata(path, metadata | {key: value}, tensors)
            try:
                load_model_config(resolve_model(str(path)))
                load_tokenizer(path)
            except ModelError:
                num_refused += 1
    assert num_refused > 150


def test_gguf_files_that_are_cut_or_flipped(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, model)
    whole = path.read_bytes()
    header_size = whole.index(b"blk.0.ffn_down")
    rng = random.Random(0)
    for _ in range(40):
        path.write_bytes(whole[: rng.randrange(len(whole))])
        with pytest.raises(ModelError):
            load_model_config(resolve_model(str(path)))
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[rng.randrange(header_size)] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with suppress(ModelError):
            load_model_config(resolve_model(str(path)))
