"""A model in several GGUF files: read as one, or refused by the file that is at fault."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runner.gguf_files import metadata_of, tensors_of, write_gguf, write_metadata
from worker.loader.errors import ModelError, ModelNotFoundError
from worker.loader.fingerprint import model_fingerprint
from worker.loader.gguf.checkpoint import GGUFCheckpoint
from worker.loader.load_config import load_model_config
from worker.loader.open import open_checkpoint
from worker.loader.source import default_served_name, resolve_model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def part(folder: Path, number: int, count: int = 3, name: str = "tiny") -> Path:
    return folder / f"{name}-{number:05}-of-{count:05}.gguf"


@pytest.fixture
def folder(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    """With a model of three parts, the first of which has no tensor."""
    tensors = list(tensors_of(model).items())
    (folder := tmp_path / "parts").mkdir()
    for number in range(3):
        write_part(folder, model, number, dict([[], tensors[:7], tensors[7:]][number]))
    return folder


def write_part(folder: Path, model: LlamaForCausalLM, number: int, tensors: dict[str, np.ndarray], **said: int) -> None:
    """`number` from 0; as the name says and the metadata do, unless `said` is otherwise."""
    wanted = {"no": number, "count": 3, "tensors.count": len(tensors_of(model))} | said
    metadata = (metadata_of(model) if number == 0 else {}) | {f"split.{key}": value for key, value in wanted.items()}
    write_metadata(part(folder, number + 1), metadata, tensors)


def open_files(path: Path) -> GGUFCheckpoint:
    source = resolve_model(str(path))
    checkpoint = open_checkpoint(source, load_model_config(source))
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


@pytest.mark.parametrize("gives_folder", [False, True])
def test_parts_are_one_model(tmp_path: Path, model: LlamaForCausalLM, folder: Path, gives_folder: bool) -> None:
    write_gguf(tmp_path / "whole.gguf", model)
    whole, parts = tmp_path / "whole.gguf", folder if gives_folder else part(folder, 1)
    assert load_model_config(resolve_model(str(parts))) == load_model_config(resolve_model(str(whole)))
    wanted, found = open_files(whole), open_files(parts)
    assert set(found.names()) == set(wanted.names())
    for name in wanted.names():
        assert np.array_equal(found.tensor(name).read(), wanted.tensor(name).read()), name


def test_parts_that_the_gguf_package_writes(tmp_path: Path, model: LlamaForCausalLM) -> None:
    tensors = tensors_of(model)
    writer = GGUFWriter(tmp_path / "it.gguf", "llama", split_max_tensors=8)
    for key, value in metadata_of(model).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(list(tmp_path.glob("it-*-of-00003.gguf"))) == 3
    assert len(list(open_files(tmp_path).names())) == len(tensors)


def test_names_and_fingerprints(folder: Path, tmp_path: Path, model: LlamaForCausalLM) -> None:
    assert default_served_name(str(part(folder, 1))) == "tiny"
    shutil.copytree(folder, tmp_path / "copy")
    before = model_fingerprint(resolve_model(str(folder)))
    assert before == model_fingerprint(resolve_model(str(tmp_path / "copy")))
    content = bytearray(part(folder, 3).read_bytes())
    content[-1] ^= 1
    part(folder, 3).write_bytes(content)
    assert before != model_fingerprint(resolve_model(str(folder)))


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("gives_folder", [False, True])
def test_a_part_that_is_missing(folder: Path, missing: int, gives_folder: bool) -> None:
    part(folder, missing).unlink()
    message = f"tiny-{missing:05}-of-00003.gguf is missing: the model has 3 parts"
    if missing == 1 and not gives_folder:
        message = "no model"
    with pytest.raises(ModelNotFoundError, match=message):
        open_files(folder if gives_folder else part(folder, 1))


def test_a_later_part_alone(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"00002-of-00003\.gguf is not the first part .* \S+-00001-of-00003"):
        resolve_model(str(part(folder, 2)))


def test_two_models_in_a_folder(folder: Path) -> None:
    shutil.copy(part(folder, 1), folder / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 models in \.gguf files"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("number", "said", "message"),
    [
        (0, {"count": 2}, "split.count is 2; 3, as the file's name says"),
        (0, {"count": 1}, "split.count is 1; 3, as the file's name says"),
        (0, {"tensors.count": 7}, "split.tensors.count is 20; 7, as the first part says"),
        (1, {"count": 4}, "split.count is 4; 3, as the file's name says"),
        (1, {"no": 2}, "split.no is 2; 1, as the file's name says"),
        (2, {"tensors.count": 9}, "split.tensors.count is 9; 20, as the first part says"),
    ],
)
def test_parts_that_do_not_fit(
    folder: Path, model: LlamaForCausalLM, number: int, said: dict[str, int], message: str
) -> None:
    write_part(folder, model, number, {}, **said)
    at_fault = part(folder, 2 if "tensors.count is 20" in message else number + 1)
    with pytest.raises(ModelError, match=re.escape(f"{at_fault}: {message}")):
        open_files(folder)


def test_parts_with_other_tensors(folder: Path, model: LlamaForCausalLM) -> None:
    """Of another model that was cut in another place: tensors occur twice, or are missing."""
    tensors = list(tensors_of(model).items())
    write_part(folder, model, 2, dict(tensors[6:]))
    with pytest.raises(ModelError, match=rf"00003-of-00003\.gguf: tensor {tensors[6][0]} is in another part, too"):
        open_files(folder)
    write_part(folder, model, 2, dict(tensors[8:]))
    with pytest.raises(ModelError, match=r"00001-of-00003.gguf: split.tensors.count is 20; its 3 parts have 19"):
        open_files(folder)


def test_a_part_of_another_architecture(folder: Path, model: LlamaForCausalLM) -> None:
    said = {"split.no": 1, "split.count": 3, "split.tensors.count": 20}
    write_metadata(part(folder, 2), said, dict(list(tensors_of(model).items())[:7]), "qwen3")
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: general\.architecture is qwen3; llama, as the first"):
        open_files(folder)


def test_one_part_under_a_name_that_says_nothing(folder: Path) -> None:
    shutil.copy(part(folder, 1), folder.parent / "a.gguf")
    with pytest.raises(ModelError, match=r"a\.gguf: split\.count is 3; 1, as the file's name says"):
        open_files(folder.parent / "a.gguf")
