"""Tokenizers that only `transformers` can read, in the form that every router reads."""

import tempfile
from pathlib import Path

from worker.loader.errors import ModelNotFoundError
from worker.loader.tokenizer_files import read_tokenizer_files


def convert_tokenizer(path: Path) -> dict[str, bytes]:
    """The files of a directory's tokenizer, or of a GGUF file's. Takes seconds, and runs no code of the model's.

    Raises ModelNotFoundError.
    """
    from transformers import AutoTokenizer

    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # whatever a reader of many formats raises is about these files
        summary = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(f"{path} has no tokenizer that can be read: {summary}") from error
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return read_tokenizer_files(Path(scratch))
