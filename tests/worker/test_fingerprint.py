"""The name of what a model computes: the same for every copy, another one for other weights."""

import os

import pytest

from worker.loader.fingerprint import NUM_SAMPLES, SAMPLE_BYTES, model_fingerprint
from worker.loader.source import ModelSource, SourceFormat

CONFIG = b'{"model_type": "llama"}'


def directory(path, files, config=CONFIG):
    path.mkdir()
    (path / "config.json").write_bytes(config)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return ModelSource("m", path, SourceFormat.SAFETENSORS)


def gguf(path, content):
    path.write_bytes(content)
    return ModelSource("m", path, SourceFormat.GGUF)


def test_copies_have_one_fingerprint_whatever_their_place_and_names(tmp_path):
    a, b = os.urandom(9000), os.urandom(5000)
    first = directory(tmp_path / "x", {"1.safetensors": a, "2.safetensors": b, "README.md": b"x"})
    second = directory(tmp_path / "y", {"p.safetensors": a, "q.safetensors": b})
    assert model_fingerprint(first) == model_fingerprint(second)
    assert model_fingerprint(gguf(tmp_path / "a.gguf", a)) == model_fingerprint(gguf(tmp_path / "b.gguf", a))


@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
def test_files_that_the_samples_cover_are_told_apart_by_any_byte(tmp_path, place):
    weights = os.urandom(9000)
    changed = weights[:place] + bytes([weights[place] ^ 1]) + weights[place + 1 :]
    one = directory(tmp_path / "x", {"1.safetensors": weights})
    other = directory(tmp_path / "y", {"1.safetensors": changed})
    assert model_fingerprint(one) != model_fingerprint(other)


def test_a_large_file_is_told_apart_by_one_byte_in_a_hundred(tmp_path):
    size = 3 * NUM_SAMPLES * SAMPLE_BYTES
    plain = directory(tmp_path / "x", {"1.safetensors": b""})
    with (plain.path / "1.safetensors").open("wb") as file:
        file.truncate(size)
    trained = directory(tmp_path / "y", {"1.safetensors": b""})
    with (trained.path / "1.safetensors").open("wb") as file:
        file.truncate(size)
        file.seek(size // 2)
        file.write(b"\1" * (size // 100))
    assert model_fingerprint(plain) != model_fingerprint(trained)


def test_configuration_counts_and_of_dummy_weights_it_alone(tmp_path):
    one = directory(tmp_path / "x", {"1.safetensors": b"a"})
    other_config = directory(tmp_path / "y", {"1.safetensors": b"a"}, b"{}")
    other_weights = directory(tmp_path / "z", {"1.safetensors": b"b"})
    assert model_fingerprint(one) != model_fingerprint(other_config)
    dummies = [model_fingerprint(source, is_dummy=True) for source in (one, other_config, other_weights)]
    assert dummies[0] == dummies[2] != dummies[1]
    assert dummies[0] != model_fingerprint(one)
