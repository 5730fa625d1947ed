"""Reader of GGUF files: the metadata in one pass, the tensors memory-mapped.

The `gguf` package has a reader too; it builds numpy views of each of the ~100,000 vocabulary strings, which takes
seconds at every start. Its dequantisers are used as they are. No numpy.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little endian).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.loader.errors import WeightsError
from worker.loader.gguf.types import SIZES, TensorType

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
DEFAULT_ALIGNMENT, MAX_ALIGNMENT, MAX_DIMS = 32, 2**20, 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file. `shape` is in row-major order (the file stores it reversed)."""

    shape: tuple[int, ...]
    type: TensorType
    data: memoryview
    """Bytes of the mapped file, row by row. Rows are all but the last dimension."""

    def parts(self) -> list["GGUFTensor"]:
        """One for each index of the first of several dimensions."""
        size = len(self.data) // self.shape[0]
        starts = range(0, len(self.data), size)
        return [GGUFTensor(self.shape[1:], self.type, self.data[start : start + size]) for start in starts]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path, *, with_texts: bool = True) -> GGUFFile:
    """Parse the header and map the tensors. Without texts, lists of them are passed over, and empty: a vocabulary takes
    longer than all else. Raises WeightsError for a damaged or unsupported file."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise WeightsError(f"{path} is too short to be a GGUF file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Parser(mapped, with_texts).parse()
    except (struct.error, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise WeightsError(f"{path} is not a readable GGUF file: {error}") from error


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """What the header says of a tensor. `offset` counts from the beginning of all tensors' data."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int


class _Parser:
    """A cursor over the mapped header."""

    def __init__(self, mapped: mmap.mmap, with_texts: bool) -> None:
        self._mapped, self._with_texts = mapped, with_texts
        self._at = 0

    def parse(self) -> GGUFFile:
        if self._mapped[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            if key in metadata:
                raise ValueError(f"the field {key} occurs twice")
            metadata[key] = self._value(self._scalar("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        base = -(-self._at // self._alignment(metadata)) * self._alignment(metadata)
        tensors = {entry.name: self._tensor(entry, base) for entry in entries}
        if len(tensors) < num_tensors:
            raise ValueError("a tensor's name occurs twice")
        return GGUFFile(metadata, tensors)

    @staticmethod
    def _alignment(metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {alignment!r}")
        return alignment

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._mapped, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        text = self._mapped[self._at : self._at + length]
        if len(text) != length:
            raise ValueError("it ends inside a string")
        self._at += length
        return text.decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has a hundred thousand of them, so these are loops without calls of ours."""
        mapped, at, length_of = self._mapped, self._at, struct.Struct("<Q").unpack_from
        texts: list[str] = []
        if not self._with_texts:
            for _ in range(count):
                at += 8 + length_of(mapped, at)[0]
            self._at = at
            return texts
        for _ in range(count):
            (length,) = length_of(mapped, at)
            at += 8
            text = mapped[at : at + length]
            if len(text) != length:
                raise ValueError("it ends inside a string")
            texts.append(text.decode("utf-8"))
            at += length
        self._at = at
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        code = f"<{count}{self._code(item)[1]}"
        values = struct.unpack_from(code, self._mapped, self._at)
        self._at += struct.calcsize(code)
        return list(values)

    @staticmethod
    def _code(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"there is no type {kind} of values")
        return _SCALARS[kind]

    def _tensor_entry(self) -> "_TensorEntry":
        name, num_dims = self._string(), self._scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))[::-1]
        return _TensorEntry(name, shape, TensorType(self._scalar("<I")), self._scalar("<Q"))

    def _tensor(self, entry: "_TensorEntry", base: int) -> GGUFTensor:
        values_per_block, bytes_per_block = SIZES[entry.type]
        if entry.shape[-1] % values_per_block:
            raise ValueError(f"tensor {entry.name}: {entry.shape[-1]} is no whole number of {entry.type.name} blocks")
        start = base + entry.offset
        end = start + math.prod(entry.shape) // values_per_block * bytes_per_block
        if end > len(self._mapped):
            raise ValueError(f"tensor {entry.name} reaches beyond the end of the file")
        return GGUFTensor(entry.shape, entry.type, memoryview(self._mapped)[start:end])
