"""One tokenizer, from the files that workers send, and the store of those in use."""

import asyncio
import hashlib
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

import tokenizers

from common.chat_template import with_chat_template
from common.tokenizer_file import read_tokenizer
from fissile.errors import InternalError
from fissile.v1 import GetTokenizerResponse
from router.model.chat_template import ChatTemplate, json_object, load_template
from router.model.defaults import Defaults, read_defaults
from router.model.detokenizer import (
    MAX_CHARACTER_BYTES,
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
    last_shown,
)
from router.model.template_traits import look_at
from router.model.vocabulary import byte_tokens, decoder_types, is_byte_level, token_bytes_table

P = ParamSpec("P")
R = TypeVar("R")

MAX_FILES_BYTES = 512 * 1024 * 1024
"""Of all of a tokenizer's files; the largest have some tens of MB."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents by file name. `fingerprint` names them all."""

    contents: Mapping[str, bytes]
    fingerprint: str


async def receive_files(stream: AsyncIterable[GetTokenizerResponse]) -> TokenizerFiles:
    """Put the parts of GetTokenizer together. Raises InternalError when a checksum or the fingerprint is missing or
    wrong, and for files that are too many or too large."""
    parts: dict[str, bytearray] = {}
    checksums: dict[str, str] = {}
    fingerprint, num_bytes = "", 0
    async for part in stream:
        num_bytes += len(part.data) + len(part.name)
        if num_bytes > MAX_FILES_BYTES:
            raise InternalError(f"the tokenizer's files have more than {MAX_FILES_BYTES} bytes")
        parts.setdefault(part.name, bytearray()).extend(part.data)
        if part.sha256:
            checksums[part.name] = part.sha256
        fingerprint = part.fingerprint
    contents = {name: bytes(data) for name, data in parts.items()}
    for name, content in contents.items():
        if checksums.get(name) != hashlib.sha256(content).hexdigest():
            raise InternalError(f"tokenizer file {name} arrived damaged: its SHA-256 does not match")
    if not fingerprint:
        raise InternalError("the tokenizer's files ended without a fingerprint")
    return TokenizerFiles(contents, fingerprint)


SHORT_TEXT = 256
"""Characters. What is no longer is encoded on the event loop: to hand it to a thread and back takes as long."""


@dataclass(slots=True, weakref_slot=True)
class Tokenizer:
    """Text to tokens and back. Immutable after `load`, apart from a cache; what is not short is encoded in `executor`,
    off the event loop."""

    fingerprint: str
    template: ChatTemplate | None
    defaults: Defaults
    """Of requests that do not say otherwise."""
    _backend: tokenizers.Tokenizer
    _executor: Executor
    _byte_level: bool
    _byte_of: dict[int, int]
    """The byte of each token that is one, where others are none."""
    _bytes: list[bytes]
    _special: dict[str, int] = field(default_factory=dict)
    _added: dict[str, int] = field(default_factory=dict)
    """Tokens that were added to the vocabulary, with the special ones."""
    _hidden_ids: dict[frozenset[str], frozenset[int]] = field(default_factory=dict)
    """Special tokens apart from some; filled at need."""
    _visible_bytes: dict[frozenset[int], list[bytes]] = field(default_factory=dict)
    """`_bytes` with hidden tokens empty; filled at need."""

    @classmethod
    def load(cls, files: TokenizerFiles, executor: Executor) -> "Tokenizer":
        """Takes up to a second for a large vocabulary. Raises InternalError when the files hold no usable tokenizer."""
        raw = files.contents.get("tokenizer.json")
        if raw is None:
            raise InternalError(f"no tokenizer.json among the tokenizer's files {sorted(files.contents)}")
        try:
            backend, vocabulary = read_tokenizer(raw)
        except ValueError as error:
            raise InternalError(str(error)) from error
        backend.no_truncation()
        backend.no_padding()
        types = decoder_types(raw)
        byte_level = is_byte_level(types)
        table = token_bytes_table(vocabulary, byte_level)
        added = backend.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        template = load_template(files.contents)
        if template is not None:
            look_at(template)
        return cls(
            fingerprint=files.fingerprint,
            template=template,
            defaults=read_defaults(json_object(files.contents, "generation_config.json")),
            _backend=backend,
            _executor=executor,
            _byte_level=byte_level,
            _byte_of=byte_tokens(types, vocabulary),
            _bytes=table,
            _special=special,
            _added={token.content: i for i, token in added.items()},
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens written in `text` are recognised."""
        if len(text) <= SHORT_TEXT:
            return self._encode(text, add_special_tokens)
        return await self.in_thread(self._encode, text, add_special_tokens)

    async def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Work on text that must not hold up the event loop."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch form computes no offsets and releases the interpreter lock; `encode` does neither.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_ids: Iterable[int]) -> list[bytes]:
        """Bytes of each token; one that the tokenizer does not know has none."""
        return [self._bytes[i] if i < len(self._bytes) else b"" for i in token_ids]

    def special_token_id(self, text: str) -> int | None:
        """The special token that `text` is, if it is one."""
        return self._special.get(text)

    def added_token_id(self, text: str) -> int | None:
        """The token that `text` always is, wherever it stands; such a token is added to the vocabulary."""
        return self._added.get(text)

    def detokenizers(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown: Set[str] = frozenset(),
        is_eager: bool = False,
    ) -> Callable[[], Detokenizer]:
        """Makes a new one for each completion of `prompt`. Special tokens in `shown` are never skipped. `is_eager`: a
        character comes with the token that completes it, see `FallbackDetokenizer`."""
        hidden = self._hidden(frozenset(shown)) if skip_special_tokens else frozenset()
        if self._byte_level:
            before = last_shown(prompt, hidden, MAX_CHARACTER_BYTES)
            return partial(ByteDetokenizer, self._visible(hidden) if hidden else self._bytes, before)
        before = last_shown(prompt, hidden)
        if self._byte_of:
            return partial(FallbackDetokenizer, self._decode_all, self._byte_of, hidden, before, is_eager=is_eager)
        return partial(WindowDetokenizer, self._decode_all, hidden, before)

    def _decode_all(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _visible(self, hidden: frozenset[int]) -> list[bytes]:
        table = self._visible_bytes.get(hidden)
        if table is None:
            table = [b"" if i in hidden else data for i, data in enumerate(self._bytes)]
            self._visible_bytes[hidden] = table
        return table

    def _hidden(self, shown: frozenset[str]) -> frozenset[int]:
        hidden = self._hidden_ids.get(shown)
        if hidden is None:
            hidden = frozenset(i for text, i in self._special.items() if text not in shown)
            self._hidden_ids[shown] = hidden
        return hidden


class TokenizerStore:
    """Tokenizers by fingerprint, each loaded once and kept while some worker link holds it."""

    def __init__(self, executor: Executor, chat_template: str | None = None) -> None:
        """`chat_template` goes before those of the models."""
        self._executor = executor
        self._chat_template = chat_template
        self._loaded: weakref.WeakValueDictionary[str, Tokenizer] = weakref.WeakValueDictionary()

    def get(self, fingerprint: str) -> Tokenizer | None:
        return self._loaded.get(fingerprint)

    async def fetch(self, parts: AsyncIterable[GetTokenizerResponse]) -> Tokenizer:
        """What GetTokenizer tells of. Raises InternalError: see `receive_files`."""
        files = await receive_files(parts)
        return self.get(files.fingerprint) or await self.load(files)

    async def load(self, files: TokenizerFiles) -> Tokenizer:
        loop = asyncio.get_running_loop()
        if self._chat_template is not None:
            files = replace(files, contents=with_chat_template(files.contents, self._chat_template))
        tokenizer = await loop.run_in_executor(self._executor, Tokenizer.load, files, self._executor)
        return self._loaded.setdefault(files.fingerprint, tokenizer)
