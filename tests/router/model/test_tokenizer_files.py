"""Files of a tokenizer as a worker sends them: whatever stands in them, they load or are an error that names one."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from fissile.errors import InternalError
from router.model.tokenizer import Tokenizer, TokenizerFiles
from tests.fakes import tokenizer as fake

VALUES: list[Any] = [None, True, -1, 2**70, 0.5, float("nan"), "", "text", [], ["a"], {}, {"a": {"b": 1}}]
WHOLE: dict[str, Any] = {
    "tokenizer_config.json": {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "LlamaTokenizer",
        "chat_template": [{"name": "default", "template": "a"}],
    },
    "special_tokens_map.json": {"bos_token": "<s>", "unk_token": {"content": "<unk>"}},
    "generation_config.json": {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "eos_token_id": [2]},
}  # fmt: skip


def load(**changes: Any) -> Tokenizer:
    contents = {name: json.dumps(changes.get(name, value)).encode() for name, value in WHOLE.items()}
    contents["tokenizer.json"] = changes.get("tokenizer.json", fake.byte_fallback().to_str().encode())
    return Tokenizer.load(TokenizerFiles(contents, "f"), None)


def tampered(value: Any) -> Iterator[Any]:
    """The value with each of its parts missing or something else, and something else altogether."""
    yield from VALUES
    if isinstance(value, dict):
        for key, part in value.items():
            yield {k: v for k, v in value.items() if k != key}
            for changed in tampered(part):
                yield value | {key: changed}
    if isinstance(value, list):
        for changed in tampered(value[0]):
            yield [changed, *value[1:]]


@pytest.mark.parametrize("name", WHOLE)
def test_every_part_of_the_files(name):
    num_refused = 0
    for changed in tampered(WHOLE[name]):
        try:
            load(**{name: changed})
        except InternalError as error:
            num_refused += 1
            assert "config.json" in error.message or "special_tokens_map.json" in error.message
    assert num_refused >= len(VALUES) - 2, "what is no object at all"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": {"a": 2**24}, "merges": []}, "token 'a' has the id 16777216; 16777215 is the most"),
        (
            {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "continuing_subword_prefix": "text"},
            "cannot be",
        ),
        ({"vocab": [], "merges": []}, "cannot be read"),
    ],
    ids=["id", "the library panics", "no vocabulary"],
)
def test_a_tokenizer_that_is_none_is_named(change, message):
    content = json.loads(fake.byte_level().to_str())
    content["model"] |= change
    content["added_tokens"] = []
    with pytest.raises(InternalError, match=r"tokenizer\.json") as caught:
        load(**{"tokenizer.json": json.dumps(content).encode()})
    assert message in caught.value.message


def test_every_part_of_the_tokenizer():
    content = json.loads(fake.byte_fallback().to_str())
    content["model"]["vocab"] = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}
    content["model"]["merges"] = [["a", "b"]]
    content["added_tokens"] = content["added_tokens"][:1]
    for changed in tampered(content):
        with suppress(InternalError):
            load(**{"tokenizer.json": json.dumps(changed).encode()})
