"""Tokenizers made from GGUF metadata: cut and framed as llama.cpp does it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.gguf_files import write_metadata
from worker.loader.errors import ModelConfigError
from worker.loader.source import ModelSource, SourceFormat
from worker.loader.tokenizer import load_tokenizer_files

LETTERS = [text for text, i in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1]) if i < 256]
WORDS = ["12", "123", "45", "Ġ1", "whole", "<s>", "</s>", "<|user|>"]
TOKENS = LETTERS + WORDS
BOS, EOS = TOKENS.index("<s>"), TOKENS.index("</s>")
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "<|user|>"]
BYTE_LEVEL = {
    "model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "merges": ["Ġ 1", "1 2", "12 3", "4 5"],
    "token_type": [1] * 261 + [3, 3, 4], "bos_token_id": BOS, "eos_token_id": EOS,
}  # fmt: skip
SENTENCE_PIECE = {
    "model": "llama", "tokens": PIECES, "scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, 0.0],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * 5 + [4], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
}  # fmt: skip


def files_of(folder: Path, keys: dict[str, Any], **others: Any) -> dict[str, bytes]:
    """Of a file with these keys below `tokenizer.ggml.`; None: not there. `others` as they are, "__" for dots."""
    path = folder / "a.gguf"
    llama = {
        "llama.block_count": 1, "llama.context_length": 8, "llama.embedding_length": 2,
        "llama.feed_forward_length": 2, "llama.attention.head_count": 1, "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4, "llama.rope.dimension_count": 2,
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata |= {key.replace("__", "."): value for key, value in others.items()}
    write_metadata(path, llama | metadata, {"token_embd.weight": np.zeros((len(keys["tokens"]), 2), np.float32)})
    return load_tokenizer_files(ModelSource("a", path, SourceFormat.GGUF)).files


def tokens_of(folder: Path, keys: dict[str, Any], text: str) -> list[str]:
    return Tokenizer.from_buffer(files_of(folder, keys)["tokenizer.json"]).encode(text).tokens


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<s>", "a"]),
        ({"pre": "smollm", "add_bos_token": True}, ["<s>", "a"]),
        ({"pre": "llama-bpe"}, ["<s>", "a"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
        ({"pre": "llama-v3", "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"add_bos_token": False, "add_eos_token": True}, ["a", "</s>"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["a"]),
        ({"add_bos_token": True, "bos_token_id": 4000}, ["a"]),
    ],
)
def test_what_stands_around_a_text(tmp_path: Path, keys: dict[str, Any], expected: list[str]) -> None:
    assert tokens_of(tmp_path, BYTE_LEVEL | keys, "a") == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["<s>", "▁ab"]),
        ({"add_bos_token": False}, ["▁ab"]),
        ({"add_eos_token": True}, ["<s>", "▁ab", "</s>"]),
        ({"add_space_prefix": False}, ["<s>", "ab"]),
    ],
)
def test_sentence_piece(tmp_path: Path, keys: dict[str, Any], expected: list[str]) -> None:
    files = files_of(tmp_path, SENTENCE_PIECE | keys)
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    assert tokenizer.encode("ab").tokens == expected
    assert tokenizer.encode("ab<|user|>").tokens[-1 - bool(keys.get("add_eos_token"))] == "<|user|>"
    assert tokenizer.decode(tokenizer.encode("ab ab é").ids) == "ab ab é"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Ġ1", "2", "3", "45"]),
        ("smollm", ["Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<s>", "Ġ", "123", "45"]),
        ("glm4", ["Ġ", "123", "45"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "5"]),
        ("tekken", ["<s>", "Ġ", "1", "2", "3", "4", "5"]),
    ],
)
def test_how_numbers_are_cut(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert tokens_of(tmp_path, BYTE_LEVEL | {"pre": pre}, " 12345") == expected


def test_llama_3_takes_a_word_that_is_a_token_whatever_the_merges_say(tmp_path: Path) -> None:
    assert tokens_of(tmp_path, BYTE_LEVEL | {"pre": "llama-bpe"}, "whole") == ["<s>", "whole"]
    assert tokens_of(tmp_path, BYTE_LEVEL, "whole") == list("whole")


def test_control_tokens_are_special_and_a_users_are_not(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_buffer(files_of(tmp_path, BYTE_LEVEL)["tokenizer.json"])
    ids = tokenizer.encode("a<s><|user|>").ids
    assert ids == [LETTERS.index("a"), BOS, TOKENS.index("<|user|>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|user|>"


@pytest.mark.parametrize("token_type", [None, [1] * 264, [1] * 261 + [4, 4, 1]])
def test_what_begins_a_text_or_ends_a_turn_is_special_whatever_its_type(tmp_path: Path, token_type: Any) -> None:
    """llama.cpp: "control-looking token"."""
    tokens = [*TOKENS[:-1], "<|im_end|>"]
    files = files_of(tmp_path, BYTE_LEVEL | {"tokens": tokens, "token_type": token_type, "eos_token_id": BOS})
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    ids = tokenizer.encode("<s>a<|im_end|></s>b").ids
    assert [tokens[i] for i in ids] == ["<s>", "a", "<|im_end|>", "</s>", "b"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_an_unknown_token_is_hidden(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_buffer(files_of(tmp_path, SENTENCE_PIECE)["tokenizer.json"])
    assert tokenizer.decode([PIECES.index("a"), 0, PIECES.index("b")], skip_special_tokens=True) == "ab"


def test_files_have_the_named_tokens_and_templates(tmp_path: Path) -> None:
    files = files_of(tmp_path, BYTE_LEVEL, tokenizer__chat_template="a", **{"tokenizer.chat_template.tool_use": "b"})
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert files["chat_template.jinja"] == b"a"
    assert files["additional_chat_templates/tool_use.jinja"] == b"b"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; one of gpt2, llama"),
        ({"pre": "bloom"}, "tokenizer.ggml.pre is 'bloom'; one of gpt-2, smollm, llama-bpe"),
        ({"pre": None}, "lacks tokenizer.ggml.pre"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"merges": ["1 2", "x yz"]}, "tokenizer.ggml.merges: "),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; true or false"),
        ({"bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id is '<s>'; a token id"),
        ({"token_type": ["a"]}, "tokenizer.ggml.token_type is ['a']; a list of whole numbers"),
    ],
)
def test_what_cannot_be_made_a_tokenizer_is_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        files_of(tmp_path, BYTE_LEVEL | keys)
    assert message in str(caught.value) and str(caught.value).startswith("a.gguf")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "lacks tokenizer.ggml.scores"),
        ([0.0], "scores has 1 scores for 265 tokens"),
        (["a"], "a list of numbers"),
    ],
)
def test_a_sentence_piece_without_its_scores(tmp_path: Path, scores: object, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        files_of(tmp_path, SENTENCE_PIECE | {"scores": scores})


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"ab": -1.0, "bc": -2.0}, ["ab", "c", "▁", "aa", "a"]),
        ({"ab": -2.0, "bc": -1.0}, ["a", "bc", "▁", "aa", "a"]),
    ],
)
def test_pieces_are_joined_by_their_scores(tmp_path: Path, scores: dict[str, float], expected: list[str]) -> None:
    """The best first, the leftmost of equals."""
    pieces = ["<unk>", "a", "b", "c", "ab", "bc", "aa", "▁"]
    keys = {"model": "llama", "tokens": pieces, "unknown_token_id": 0, "add_space_prefix": False,
            "token_type": [2] + [1] * 7, "scores": [scores.get(piece, 0.0) for piece in pieces]}  # fmt: skip
    assert tokens_of(tmp_path, keys, "abc aaa") == expected


def test_a_space_goes_before_each_text_between_special_tokens(tmp_path: Path) -> None:
    assert tokens_of(tmp_path, SENTENCE_PIECE, "ab<|user|>ab ab") == ["<s>", "▁ab", "<|user|>", "▁ab", "▁ab"]
    assert tokens_of(tmp_path, SENTENCE_PIECE, " ab") == ["<s>", "▁", "▁ab"]
