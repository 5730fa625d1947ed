"""Tokens that stand beside tokenizer.json alone: text has the tokens that it has in `transformers`, and hides those."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.fakes import tokenizer as toys
from tests.runner.conftest import save_llama
from worker.loader.load_config import load_common_config
from worker.loader.source import resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.loader.told_tokens import TOKENIZER, with_told_tokens

BOS, END = toys.BOS, toys.IM_END
TEXT = f"{BOS} hello {END} x"


def tokenizer_json(*, without: str = "", not_special: str = "") -> dict:
    """A vocabulary with three special tokens, of which one is in the vocabulary alone, or added and not special."""
    content = json.loads(toys.byte_level().to_str())
    content["post_processor"] = None
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != without]
    for token in content["added_tokens"]:
        token["special"] = token["content"] != not_special
    return content


def entry(content: str, **flags: bool) -> dict:
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False} | flags


def listed(**flags: bool) -> dict:
    """An `added_tokens_decoder` of all three."""
    texts = (BOS, toys.IM_START, END)
    return {str(i): entry(text, special=True) | (flags if text == END else {}) for i, text in enumerate(texts)}


PLAIN, NOT_SPECIAL = tokenizer_json(without=END), tokenizer_json(not_special=END)
CASES = {
    "named": (PLAIN, {"eos_token": END}, {}),
    "named, with flags": (PLAIN, {"eos_token": entry(END, lstrip=True) | {"__type": "AddedToken"}}, {}),
    "named, added": (NOT_SPECIAL, {"eos_token": END}, {}),
    "named in the map": (PLAIN, {}, {"eos_token": END}),
    "one of more": (PLAIN, {}, {"additional_special_tokens": [END]}),
    "one of more, in the configuration": (PLAIN, {"additional_special_tokens": [END]}, {}),
    "named by the model": (PLAIN, {"extra_special_tokens": {"turn_end": END}}, {}),
    "named by the model, at the top": (PLAIN, {"turn_end_token": END}, {}),
    "listed": (PLAIN, {"added_tokens_decoder": listed()}, {}),
    "listed as special": (NOT_SPECIAL, {"added_tokens_decoder": listed()}, {}),
    "listed with blanks": (tokenizer_json(), {"added_tokens_decoder": listed(lstrip=True, rstrip=True)}, {}),
    "listed, not special": (PLAIN, {"added_tokens_decoder": listed(special=False)}, {}),
    "listed, and the map is not": (
        PLAIN,
        {"added_tokens_decoder": {"0": entry(BOS, special=True)}},
        {"eos_token": END},
    ),
    "new": (tokenizer_json(), {"added_tokens_decoder": listed() | {"320": entry(" hello", special=True)}}, {}),
    "known": (tokenizer_json(), {"added_tokens_decoder": listed(), "eos_token": END}, {"bos_token": BOS}),
}


def save(folder: Path, tokenizer: dict, config: dict, tokens_map: dict) -> None:
    (folder / "config.json").write_text("{}")
    (folder / TOKENIZER).write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    if tokens_map:
        (folder / "special_tokens_map.json").write_text(json.dumps(tokens_map))


@pytest.mark.parametrize("case", CASES)
def test_text_has_the_tokens_of_transformers(tmp_path: Path, case: str) -> None:
    save(tmp_path, *CASES[case])
    reference = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_buffer(load_tokenizer_files(resolve_model(str(tmp_path))).files[TOKENIZER])
    expected = reference(TEXT, add_special_tokens=False).input_ids
    ids = ours.encode(TEXT, add_special_tokens=False).ids
    assert ids == expected
    shown = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, skip_special_tokens=True) == shown


def test_what_tokenizer_json_knows_already_leaves_it_as_it_is() -> None:
    tokenizer, config, tokens_map = CASES["known"]
    files = {
        TOKENIZER: json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": json.dumps(tokens_map).encode(),
    }
    assert with_told_tokens(files) is files


def test_a_word_that_stands_for_padding_is_shown() -> None:
    """In `transformers` it would be hidden, and an answer have none of its exclamation marks."""
    files = {TOKENIZER: json.dumps(tokenizer_json()).encode(), "tokenizer_config.json": b'{"pad_token": "!"}'}
    assert with_told_tokens(files) is files


@pytest.mark.parametrize(
    "config", [{"sep_token": "[PAD]"}, {"added_tokens_decoder": {"900": entry("[PAD]", special=True)}}]
)
def test_what_the_model_cannot_know_is_left_out(config: dict) -> None:
    """`transformers` would give it the next id, for which there may be no embedding."""
    files = {TOKENIZER: json.dumps(PLAIN).encode(), "tokenizer_config.json": json.dumps(config).encode()}
    assert Tokenizer.from_buffer(with_told_tokens(files)[TOKENIZER]).token_to_id("[PAD]") is None


ENDINGS = {
    "named": (tokenizer_json(), {"eos_token": END}, {}),
    "named in the map": (tokenizer_json(), {}, {"eos_token": entry(END)}),
    "the map goes first": (tokenizer_json(), {"eos_token": BOS}, {"eos_token": END}),
    "listed": ({}, {"eos_token": END, "added_tokens_decoder": listed()}, {"eos_token": BOS}),
    "in the vocabulary alone": (PLAIN, {"eos_token": END}, {}),
}


@pytest.mark.parametrize("case", ENDINGS)
@pytest.mark.parametrize("model_impl", ["fissile", "transformers"])
def test_what_the_tokenizer_calls_the_end_is_one(tmp_path: Path, case: str, model_impl: str) -> None:
    save_llama(tmp_path, vocab_size=400, eos_token_id=7)
    config = (tmp_path / "config.json").read_text()
    save(tmp_path, *ENDINGS[case])
    (tmp_path / "config.json").write_text(config)
    found = load_common_config(resolve_model(str(tmp_path)), model_impl)
    assert found.eos_token_ids == (7, toys.byte_level().token_to_id(END))


def test_an_end_that_the_model_does_not_have_is_left_out_and_named(tmp_path: Path) -> None:
    save_llama(tmp_path, vocab_size=400, eos_token_id=7)
    told = {"added_tokens_decoder": {"400": entry("[END]")}, "eos_token": "[END]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    config = load_common_config(resolve_model(str(tmp_path)), "fissile")
    assert config.eos_token_ids == (7,)
    assert config.remarks == ("tokenizer_config.json: eos_token names 400, beyond the vocabulary of 400: left out",)
