"""Tokens that only the files beside tokenizer.json tell of. `transformers` adds them, and makes those special that have
a role there: such a token is found in a text as it stands, and hidden in an answer."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

TOKENIZER, CONFIG, TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class Token:
    """As an entry of a file says it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


_FLAGS = tuple(field.name for field in fields(Token) if field.name != "content")


def with_told_tokens(files: dict[str, bytes]) -> dict[str, bytes]:
    """`files`, with these tokens in tokenizer.json. One that is not in its vocabulary, and could not be at the id that
    is told, is left out: the model does not know it. A file that is not what its name says is left as it is, for
    `check_tokenizer_files`."""
    config, tokens_map, tokenizer = (_object(files.get(name, b"")) for name in (CONFIG, TOKENS_MAP, TOKENIZER))
    known = {token.content: token for token in map(_token, _list(tokenizer.get("added_tokens"))) if token}
    listed = _listed(config.get("added_tokens_decoder"))
    # As in `transformers`, the map counts where the configuration lists no tokens.
    named = _named(config) if listed else [*_named(config), *_named(tokens_map)]
    told = {token.content: replace(token, special=_is_special(token, known)) for token in listed.values()}
    for token in named:
        text = token.content
        told[text] = replace(told.get(text) or known.get(text) or token, special=True)
    changed = [token for token in told.values() if token != known.get(token.content)]
    if not changed:
        return files
    ids = {token.content: number for number, token in listed.items()}
    return files | {TOKENIZER: _added(files[TOKENIZER], changed, ids)}


def id_of_role(folder: Path, role: str) -> int | None:
    """Of the token that has this role (`eos_token`) in the files of a directory's tokenizer; None where they do not
    say, or are not what their names say."""
    config, tokens_map = (_object(_content(folder / name)) for name in (CONFIG, TOKENS_MAP))
    listed = _listed(config.get("added_tokens_decoder"))
    named = config if listed or tokens_map.get(role) is None else tokens_map
    text = next((token.content for token in _named({role: named.get(role)})), None)
    if text is None:
        return None
    ids = {token.content: number for number, token in listed.items()}
    return ids[text] if text in ids else _id_in_tokenizer(_object(_content(folder / TOKENIZER)), text)


def _id_in_tokenizer(tokenizer: Mapping[str, Any], text: str) -> int | None:
    for entry in _list(tokenizer.get("added_tokens")):
        token = _token(entry)
        if token and token.content == text and type(entry.get("id")) is int:
            return int(entry["id"])
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if type(found) is int else None


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _is_special(token: Token, known: Mapping[str, Token]) -> bool:
    """What is special in tokenizer.json stays so."""
    return token.special or (token.content in known and known[token.content].special)


def _added(content: bytes, tokens: Iterable[Token], ids: Mapping[str, int]) -> bytes:
    from tokenizers import AddedToken

    from common.tokenizer_file import read_tokenizer

    try:
        tokenizer, _ = read_tokenizer(content)
    except ValueError:
        return content
    for token in tokens:
        is_next = ids.get(token.content) == max(tokenizer.get_vocab().values(), default=-1) + 1
        if is_next or tokenizer.token_to_id(token.content) is not None:
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([AddedToken(**asdict(token))])
    return tokenizer.to_str().encode()


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _token(value: object) -> Token | None:
    """None: it is no entry of a token."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or not value["content"]:
        return None
    return Token(value["content"], **{name: value.get(name) is True for name in _FLAGS})


def _listed(value: object) -> dict[int, Token]:
    """The entries of an `added_tokens_decoder`, by id and in its order."""
    entries = value.items() if isinstance(value, dict) else ()
    found = {int(i): token for i, entry in entries if i.isascii() and i.isdigit() and (token := _token(entry))}
    return dict(sorted(found.items()))


def _named(values: Mapping[str, Any]) -> Iterator[Token]:
    """Those that have a role."""
    for name, value in values.items():
        if name == "pad_token":
            continue  # it may be any word, which would be hidden in answers
        if name in _LISTS:
            entries = list(value.values()) if isinstance(value, dict) else _list(value)
        else:
            entries = [value] if name.endswith("_token") else []
        for entry in entries:
            token = Token(entry) if isinstance(entry, str) and entry else _token(entry)
            if token:
                yield token
