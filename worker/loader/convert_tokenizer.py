"""Tokenizers that only `transformers` can read, in the form that every router reads."""

import tempfile
from pathlib import Path

from worker.loader.errors import ModelNotFoundError
from worker.loader.tokenizer_files import read_tokenizer_files

SOURCES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json", "tiktoken.model",
)  # fmt: skip
"""Files that tokenizers are made from."""
MAX_SUMMARY = 300
"""Characters of the reader's own words."""


def check_has_tokenizer(path: Path) -> None:
    """Raises ModelNotFoundError for a directory with nothing that one could be made from."""
    if not any((path / name).is_file() for name in SOURCES):
        raise ModelNotFoundError(f"{path} has no tokenizer: none of {', '.join(SOURCES)} is there")


def convert_tokenizer(path: Path) -> dict[str, bytes]:
    """The files of a directory's tokenizer. Takes seconds, and runs no code of the model's.

    Raises ModelNotFoundError.
    """
    check_has_tokenizer(path)
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a reader of many formats raises is about these files
        summary = " ".join(str(error).split())[:MAX_SUMMARY] or type(error).__name__
        raise ModelNotFoundError(f"{path} has no tokenizer that can be read: {summary}") from error
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return read_tokenizer_files(Path(scratch))
