"""A short name for what a model computes: two workers with the same one continue each other's completions. No torch."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from worker.loader.source import ModelSource, SourceFormat, gguf_parts

HEAD_BYTES = 32 * 1024 * 1024
"""Of a GGUF file, whose configuration and vocabulary come first."""
NUM_SAMPLES = 4096
"""Of the weights, spread evenly over all files. To read terabytes at each start takes minutes, and training changes
most weights: that a change of one in a hundred is missed has a chance of e^-40."""
SAMPLE_BYTES = 4096


def model_fingerprint(source: ModelSource, *, is_dummy: bool = False) -> str:
    """SHA-256 (hex) over the configuration and samples of the weights; `is_dummy`: over the configuration alone, as
    dummy weights are the same everywhere. How files are called does not count. Raises OSError."""
    digest = hashlib.sha256(b"dummy" if is_dummy else b"")
    if source.format is SourceFormat.GGUF:
        files = gguf_parts(source.path)
        digest.update(_part(source.path, 0, HEAD_BYTES))
    else:
        files = sorted(source.path.glob("*.safetensors"))
        digest.update((source.path / "config.json").read_bytes())
    for sample in () if is_dummy else _samples(files):
        digest.update(sample)
    return digest.hexdigest()


def _samples(files: list[Path]) -> Iterator[bytes]:
    sizes = [file.stat().st_size for file in files]
    distance = max(SAMPLE_BYTES, sum(sizes) // NUM_SAMPLES)
    for file, size in zip(files, sizes, strict=True):
        yield size.to_bytes(8, "little")
        with file.open("rb") as opened:
            for start in range(0, size, distance):
                opened.seek(start)
                yield opened.read(SAMPLE_BYTES)


def _part(file: Path, start: int, length: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(length)
