"""Which files of a directory belong to its tokenizer, and whether they are what their names say."""

import json
from collections.abc import Mapping
from pathlib import Path

from worker.loader.errors import ModelConfigError

JSON_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
FILE_NAMES = ("tokenizer.json", "chat_template.jinja", *JSON_OBJECTS)
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of chat templates beside the default one, a file each."""


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """By name, those that are there."""
    named = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    names = [*FILE_NAMES, *(f"{NAMED_TEMPLATES}/{path.name}" for path in named)]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def check_tokenizer_files(files: Mapping[str, bytes], vocab_size: int) -> str | None:
    """Before a router gets them: a start that fails here says what is wrong with which file. Raises ModelConfigError.

    Returns what the log should say about a tokenizer that knows more tokens than the model.
    """
    from common.tokenizer_file import read_tokenizer  # its library, which a rank has no use for

    for name, content in files.items():
        if name in JSON_OBJECTS:
            _check_json_object(name, content)
        elif name.endswith(".jinja"):
            _check_text(name, content)
    try:
        _, vocabulary = read_tokenizer(files["tokenizer.json"])
    except ValueError as error:
        raise ModelConfigError(str(error)) from error
    beyond = sorted((i, text) for text, i in vocabulary.items() if i >= vocab_size)
    if not beyond:
        return None
    return (
        f"tokenizer.json knows {len(beyond)} tokens that the model, with {vocab_size}, does not; the first is "
        f"{beyond[0][1]!r}. Prompts with one of them are refused"
    )


def _check_json_object(name: str, content: bytes) -> None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"cannot read {name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{name} holds no JSON object")


def _check_text(name: str, content: bytes) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"cannot read {name}: {error}") from error
