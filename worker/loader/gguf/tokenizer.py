"""A tokenizer's files, made from the metadata of a GGUF file: how text is cut and what is put around it is what
llama.cpp does for the same file. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.loader.errors import ModelConfigError
from worker.loader.fields import Fields
from worker.loader.gguf.config import ENDING_KEYS, ENDING_TEXTS, TOKENIZER
from worker.loader.gguf.file import read_gguf
from worker.loader.gguf.sentence_piece import sentence_piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
"""`tokenizer.ggml.model`: byte-level BPE, and SentencePiece's BPE."""
TEMPLATE = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is cut before byte-level BPE."""

    words: str | None = None
    """A regular expression; None: GPT-2's."""
    splits_digits: bool = False
    takes_whole_words: bool = False
    """A word that is a token is that token, whatever the merges say."""
    adds_bos: bool = False
    """Unless the file says otherwise."""


_LLAMA3 = Splitting(_LLAMA3_WORDS, takes_whole_words=True, adds_bos=True)
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting(),
    "smollm": Splitting(splits_digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "glm4": Splitting(_LLAMA3_WORDS),
    "qwen2": Splitting(_QWEN2_WORDS),
    "deepseek-r1-qwen": Splitting(_QWEN2_WORDS),
    "tekken": Splitting(_TEKKEN_WORDS, takes_whole_words=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`. A guess at another one would give other tokens than the model was trained on."""


def gguf_tokenizer_files(path: Path) -> dict[str, bytes]:
    """In the layout of a Hugging Face directory. Raises ModelConfigError or WeightsError."""
    fields = Fields(read_gguf(path).metadata, path.name)
    kind = fields.text(f"{TOKENIZER}model", one_of=(BYTE_LEVEL, SENTENCE_PIECE))
    tokens = fields.texts(f"{TOKENIZER}tokens")
    named = _named_tokens(fields, tokens)
    if kind == BYTE_LEVEL:
        splitting = SPLITTINGS[fields.text(f"{TOKENIZER}pre", one_of=SPLITTINGS)]
        tokenizer, adds_bos = _byte_level(fields, tokens, splitting), splitting.adds_bos
    else:
        tokenizer, adds_bos = sentence_piece(fields, TOKENIZER, tokens), True
    _add_special_tokens(fields, tokenizer, tokens)
    _set_ends(fields, tokenizer, named, adds_bos)
    config = {**named, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        **_templates(fields),
    }


def _named_tokens(fields: Fields, tokens: list[str]) -> dict[str, str]:
    """Texts of the tokens that the metadata name; ids beyond the list have none."""
    found = {name: fields.token_ids(TOKENIZER + key) for name, key in _NAMED_TOKENS.items()}
    return {name: tokens[ids[0]] for name, ids in found.items() if ids and ids[0] < len(tokens)}


def _byte_level(fields: Fields, tokens: list[str], splitting: Splitting) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pairs = [merge.partition(" ") for merge in fields.texts(f"{TOKENIZER}merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.takes_whole_words)
    except Exception as error:  # the library's own, of no narrower type
        raise ModelConfigError(f"{fields.file}: {TOKENIZER}merges: {error}") from error
    tokenizer = Tokenizer(model)
    splits: list[Any] = []
    if splitting.splits_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.words is not None:
        splits.append(pre_tokenizers.Split(Regex(splitting.words), "isolated"))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special_tokens(fields: Fields, tokenizer: "Tokenizer", tokens: list[str]) -> None:
    """Tokens that are recognised in text as they stand. Those of control are special, and those that end a turn or
    begin a text, too, whatever type the file gives them: llama.cpp sees that in their texts."""
    from tokenizers import AddedToken

    kinds = dict(enumerate(fields.integers(f"{TOKENIZER}token_type", [])))
    keys = ("bos_token_id", "unknown_token_id", *ENDING_KEYS)
    roles = {i for key in keys for i in fields.token_ids(TOKENIZER + key)}
    special, others = [], []
    for i, text in enumerate(tokens):
        kind = kinds.get(i)
        if kind in (_UNKNOWN, _CONTROL) or i in roles or text in ENDING_TEXTS:
            special.append(AddedToken(text, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(text, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)


def _set_ends(fields: Fields, tokenizer: "Tokenizer", named: Mapping[str, str], adds_bos: bool) -> None:
    """What encoding puts around a text. `adds_bos`: where the file does not say."""
    from tokenizers import processors

    wanted = {
        "bos_token": fields.flag(f"{TOKENIZER}add_bos_token", adds_bos),
        "eos_token": fields.flag(f"{TOKENIZER}add_eos_token", False),
    }
    added = {name: named[name] for name, is_wanted in wanted.items() if is_wanted and name in named}
    parts = [added.get("bos_token"), "$A", added.get("eos_token")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in parts if part is not None],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in set(added.values())],
    )


def _templates(fields: Fields) -> dict[str, bytes]:
    files = {}
    if TEMPLATE in fields:
        files["chat_template.jinja"] = fields.text(TEMPLATE).encode()
    for key in fields.names():
        if key.startswith(f"{TEMPLATE}."):
            name = key.removeprefix(f"{TEMPLATE}.")
            files[f"additional_chat_templates/{Path(name).name}.jinja"] = fields.text(key).encode()
    return files
