"""`TokenizerFiles`: the bytes of a model's tokenizer, as the worker ships them to routers. No torch."""

import hashlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.loader.errors import ModelNotFoundError
from worker.loader.source import ModelSource, SourceFormat

FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of chat templates beside the default one, a file each."""
_CONTROL, _USER_DEFINED = 3, 4
_DIGIT_SPLITTING = {"smollm"}
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """File name → bytes, in the layout of a Hugging Face model directory. Always holds `tokenizer.json`."""

    files: dict[str, bytes]
    fingerprint: str = field(init=False)
    """SHA-256 (hex) over names and contents: equal files, equal fingerprint."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(len(name).to_bytes(8, "little") + name.encode())
            digest.update(len(self.files[name]).to_bytes(8, "little") + self.files[name])
        object.__setattr__(self, "fingerprint", digest.hexdigest())


def load_tokenizer_files(source: ModelSource) -> TokenizerFiles:
    """Read the tokenizer of a directory, or make one from a GGUF file's metadata. Raises ModelError.

    A byte-level BPE of a GGUF file is built here in well under a second. Other kinds, and directories without a
    tokenizer.json, are converted by `transformers`, which takes seconds.
    """
    if source.format is SourceFormat.GGUF:
        from worker.loader.gguf_file import read_gguf

        metadata = read_gguf(source.path).metadata
        if _is_byte_level(metadata):
            return TokenizerFiles(_byte_level_files(metadata))
        return TokenizerFiles(_converted(source.path.parent, gguf_file=source.path.name))
    files = _read_files(source.path)
    if "tokenizer.json" not in files:
        files = _converted(source.path) | files
    return TokenizerFiles(files)


def _converted(folder: Path, **options: str) -> dict[str, bytes]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{folder} has no tokenizer that can be read: {error}") from error
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return _read_files(Path(scratch))


def _read_files(folder: Path) -> dict[str, bytes]:
    named = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    names = [*FILE_NAMES, *(f"{NAMED_TEMPLATES}/{path.name}" for path in named)]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _is_byte_level(metadata: dict[str, Any]) -> bool:
    """Byte-level BPE whose text splitting is known here: GPT-2's, with or without single digits."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    return metadata.get("tokenizer.ggml.model") == "gpt2" and pre in _DIGIT_SPLITTING | {"gpt-2"}


def _byte_level_files(metadata: dict[str, Any]) -> dict[str, bytes]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    keys = "tokenizer.ggml."
    tokens: list[str] = metadata[f"{keys}tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{keys}merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    splits: list[pre_tokenizers.PreTokenizer] = []
    if metadata.get(f"{keys}pre") in _DIGIT_SPLITTING:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get(f"{keys}token_type", [])
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(t, normalized=False, special=kind == _CONTROL)
                for t, k in zip(tokens, kinds, strict=False)
                if k == kind
            ]
        )

    named = {name: metadata.get(keys + key) for name, key in _SPECIAL_TOKENS.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in named.items() if i is not None}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata.get(f"{keys}add_bos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    template = metadata.get("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template.encode()
    generation = {"bos_token_id": named["bos_token"], "eos_token_id": named["eos_token"]}
    files["generation_config.json"] = json.dumps(generation).encode()
    return files
