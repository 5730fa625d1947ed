"""The files of a directory that hold its tensors, and whether they are whole. No torch: a worker looks before ranks
start."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from worker.loader.errors import WeightsError
from worker.loader.fields import Fields, read_json

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""Of the format itself."""
MAX_LISTED = 5
"""Files in a message."""
_HEADER_LENGTH = struct.Struct("<Q")


def shard_paths(directory: Path) -> list[Path]:
    """Those that the index names or, without one, every *.safetensors file; at least one, and all are there. Raises
    WeightsError or ModelConfigError."""
    if not (directory / INDEX).is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise WeightsError(f"{directory} holds no weights: there is neither {INDEX} nor any *.safetensors file")
        return paths
    paths = [directory / name for name in _indexed_files(Fields(read_json(directory / INDEX), INDEX))]
    if missing := [path.name for path in paths if not path.is_file()]:
        listed = ", ".join(missing[:MAX_LISTED]) + (", …" if len(missing) > MAX_LISTED else "")
        raise WeightsError(f"{directory} lacks {len(missing)} of the {len(paths)} files that {INDEX} names: {listed}")
    return paths


def check_shards(paths: Sequence[Path]) -> None:
    """That each is as long as its header says: a copy that was broken off is found in milliseconds. Raises
    WeightsError."""
    for path in paths:
        try:
            wanted, found = _length_by_header(path), path.stat().st_size
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from error
        if wanted != found:
            raise WeightsError(f"{path} has {found} bytes; by its header it has {wanted}: it was not copied whole")


def _length_by_header(path: Path) -> int:
    """Raises ValueError or OSError."""
    with path.open("rb") as file:
        start = file.read(_HEADER_LENGTH.size)
        if len(start) < _HEADER_LENGTH.size:
            raise ValueError(f"it has {len(start)} bytes, too few for a safetensors file")
        (length,) = _HEADER_LENGTH.unpack(start)
        if length > MAX_HEADER_BYTES:
            raise ValueError("it does not begin like a safetensors file")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"it ends within its header, after {_HEADER_LENGTH.size + len(text)} bytes")
    header = json.loads(text)
    try:
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return _HEADER_LENGTH.size + length + max(ends, default=0)
    except (AttributeError, LookupError, TypeError):
        raise ValueError("its header does not say where its tensors are") from None


def _indexed_files(index: Fields) -> list[str]:
    """Names of files beside the index: it cannot lead anywhere else."""
    weight_map = index.section("weight_map")
    names = {weight_map.text(tensor) for tensor in weight_map.names()}
    if not names:
        raise index.error("weight_map", "a map from at least one tensor to its file")
    for name in names:
        if Path(name).name != name:
            raise index.error("weight_map", "a map from tensors to files of the same directory")
    return sorted(names)
