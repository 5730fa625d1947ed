"""Checkpoint of a directory of safetensors files, memory-mapped: a rank reads only its own shard."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.loader.errors import WeightsError
from worker.loader.shards import shard_paths

_BUFFERS = (".rotary_emb.inv_freq",)
"""Old checkpoints store buffers that are computed from the configuration."""
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """Implements `Checkpoint`. Reads the index or, without one, every *.safetensors file of the directory."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in shard_paths(directory):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"cannot read {path}: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def names(self) -> Iterable[str]:
        return [name for name in self._files if not name.endswith(_BUFFERS)]

    def tensor(self, name: str, packed: bool = False) -> "SafetensorsTensor":
        return SafetensorsTensor(self._files[name].get_slice(name), packed=packed)


class SafetensorsTensor:
    """Implements `LazyTensor`."""

    def __init__(self, piece: Any, *, packed: bool = False) -> None:
        """Raises ValueError for numbers that are not those of a plain checkpoint, unless they are `packed` ones."""
        if not packed and piece.get_dtype() not in _DTYPES:
            raise ValueError(f"it is stored as {piece.get_dtype()}; one of {', '.join(_DTYPES)} is needed")
        self._piece = piece
        self.shape = tuple(piece.get_shape())

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        if length is None:
            return self._piece[:] if self.shape else self._piece[...]  # a number alone has no slices
        index = (slice(None),) * dim + (slice(start, start + length),)
        return self._piece[index]

    def stored(self, dim: int, start: int, length: int) -> None:
        return None
