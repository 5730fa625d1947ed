"""A model's chat templates, and the special tokens they may name, from the files of its tokenizer."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from common.chat_template import CONFIG, NAMED_TEMPLATES, TEMPLATE, read_chat_template
from common.jinja import compiled
from fissile.errors import InternalError
from router.model.vocabulary import decoder_types, is_byte_level

logger = logging.getLogger(__name__)

TOKENS_MAP = "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT2 = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_QWEN = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
CLASS_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": _GPT2 | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
}  # fmt: skip
"""Tokens that `transformers`' tokenizer classes have by default. Its classes import torch where there is one, so the
router cannot ask them; a test does."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The templates of a model and the variables its tokenizer gives them."""

    default: str
    with_tools: str | None = None
    """A template of its own for requests with tools, where the model has one."""
    variables: Mapping[str, str] = field(default_factory=dict)


def template_of_operator(path: Path | None) -> str | None:
    """The template in a file, if there is one. Raises InvalidArgumentError, naming the file and line at fault."""
    return None if path is None else read_chat_template(path)


def load_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """None: the model has no template, or none that is a template. Raises InternalError naming a malformed file."""
    config = json_object(files, CONFIG)
    sources = _sources(files, config)
    sources = {name: source for name, source in sources.items() if _is_template(name, source)}
    if "default" not in sources:
        return None
    return ChatTemplate(sources["default"], sources.get("tool_use"), _special_tokens(files, config))


def json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The contents of a JSON file; empty when there is none. Raises InternalError naming the file."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise InternalError(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InternalError(f"{name} holds no JSON object")
    return value


def _sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files go before what tokenizer_config.json says."""
    told = config.get("chat_template") or []
    if isinstance(told, str):
        told = [{"name": "default", "template": told}]
    if not isinstance(told, list) or not all(_is_named_template(entry) for entry in told):
        raise InternalError(f"{CONFIG}: chat_template is neither a text nor a list of names and templates")
    sources = {entry["name"]: entry["template"] for entry in told}
    for name, content in files.items():
        if name == TEMPLATE:
            sources["default"] = _text(name, content)
        elif name.startswith(NAMED_TEMPLATES):
            sources[name.removeprefix(NAMED_TEMPLATES).removesuffix(".jinja")] = _text(name, content)
    return sources


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InternalError(f"{name} cannot be read: {error}") from error


def _is_template(name: str, source: str) -> bool:
    """Whether it is not empty and its syntax is right. It is not rendered: it may still refuse a conversation."""
    try:
        compiled(source)
    except TemplateSyntaxError as error:
        logger.error("the model's chat template %r is not used: line %d: %s", name, error.lineno, error.message)
        return False
    except RecursionError:
        logger.error("the model's chat template %r is not used: it is nested too deeply", name)
        return False
    return bool(source)


def _special_tokens(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """As `transformers` finds them: special_tokens_map.json goes first, but counts only where the configuration lists
    no tokens itself; what neither of them has, the tokenizer's class may."""
    told = dict(config)
    if "added_tokens_decoder" not in config:
        told |= json_object(files, TOKENS_MAP)
    told = _class_defaults(files, config) | told
    standard = {name: _content(name, told[name]) for name in SPECIAL_TOKENS if told.get(name) is not None}
    return _own_tokens(told) | standard


def _own_tokens(told: Mapping[str, Any]) -> dict[str, str]:
    """Tokens that only this model has a name for, such as image_token."""
    extra = told.get("extra_special_tokens")
    named = (extra if isinstance(extra, dict) else {}) | {k: v for k, v in told.items() if k.endswith("_token")}
    return {name: token for name, token in named.items() if isinstance(token, str) and name not in SPECIAL_TOKENS}


def _class_defaults(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    # Llama 3's files have called themselves Llama's, which they are not; `transformers` sees that, too.
    if name == "LlamaTokenizer" and is_byte_level(decoder_types(files.get("tokenizer.json", b"{}"))):
        return {}
    return dict(CLASS_DEFAULTS.get(name, {}))


def _content(name: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise InternalError(f"{CONFIG}: {name} is {content!r}; a text is needed")
    return content
