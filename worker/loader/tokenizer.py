"""`TokenizerFiles`: the bytes of a model's tokenizer, as the worker ships them to routers. No torch."""

import hashlib
from dataclasses import dataclass, field

from worker.loader.convert_tokenizer import convert_tokenizer
from worker.loader.source import ModelSource, SourceFormat
from worker.loader.tokenizer_files import read_tokenizer_files
from worker.loader.told_tokens import with_told_tokens


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
    """Read the tokenizer of a directory, or make one from a GGUF file's metadata. Raises ModelError naming the file
    that is at fault."""
    if source.format is SourceFormat.GGUF:
        from worker.loader.gguf.tokenizer import gguf_tokenizer_files

        return TokenizerFiles(gguf_tokenizer_files(source.path))
    files = read_tokenizer_files(source.path)
    if "tokenizer.json" not in files:
        files = convert_tokenizer(source.path) | files
    return TokenizerFiles(with_told_tokens(files))
