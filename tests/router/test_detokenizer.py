"""Joined pieces equal decoding the whole; no piece ends inside a character."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.detokenizer import ByteDetokenizer, WindowDetokenizer, is_byte_level, token_bytes_table
from router.tokenizer import Tokenizer, TokenizerFiles
from tests.fakes import tokenizer as toys

TEXT = "naïve 😀 漢字 text\n\n  é"
BYTE_LEVEL = toys.byte_level()
FALLBACK = toys.byte_fallback()
TABLE = token_bytes_table(BYTE_LEVEL, True)


def byte_detokenizer():
    return ByteDetokenizer(TABLE)


def window_detokenizer(hidden=frozenset()):
    return WindowDetokenizer(lambda ids: FALLBACK.decode(ids, skip_special_tokens=False), hidden)


def pieces_of(detokenizer, ids, size=1):
    pieces = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_which_tokenizers_are_byte_level():
    assert is_byte_level(BYTE_LEVEL.to_str().encode())
    assert not is_byte_level(FALLBACK.to_str().encode())
    assert not is_byte_level(b'{"decoder": null}')


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("tokenizer", "make"), [(BYTE_LEVEL, byte_detokenizer), (FALLBACK, window_detokenizer)], ids=["bytes", "window"]
)
def test_joined_pieces_equal_the_whole(tokenizer, make, size):
    ids = encode(tokenizer, TEXT)
    pieces = pieces_of(make(), ids, size)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(
    ("tokenizer", "make"), [(BYTE_LEVEL, byte_detokenizer), (FALLBACK, window_detokenizer)], ids=["bytes", "window"]
)
def test_a_character_cut_off_at_the_end_is_one_replacement_character(tokenizer, make):
    ids = encode(tokenizer, "a😀")
    for missing in (1, 2, 3):
        pieces = pieces_of(make(), ids[:-missing])
        assert "".join(pieces).endswith("a\ufffd")
        assert "".join(pieces).count("\ufffd") == 1
        assert pieces[-1] == "\ufffd"


@given(st.lists(st.integers(0, len(TABLE) - 1), max_size=20), st.integers(1, 4))
def test_byte_level_is_exact_for_any_tokens(ids, size):
    assert "".join(pieces_of(byte_detokenizer(), ids, size)) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(st.text("ab é漢😀", max_size=12), st.integers(1, 4))
def test_window_is_exact_for_any_text(text, size):
    ids = encode(FALLBACK, text)
    assert "".join(pieces_of(window_detokenizer(), ids, size)) == FALLBACK.decode(ids, skip_special_tokens=False)


def test_hidden_tokens_leave_no_text_and_do_not_split_words():
    ids = encode(FALLBACK, "Paris")
    eos = FALLBACK.token_to_id("</s>")
    assert "".join(pieces_of(window_detokenizer({eos}), [*ids, eos, *ids, eos])) == FALLBACK.decode([*ids, *ids])


def test_endless_invalid_bytes_are_shown_in_time():
    byte = FALLBACK.token_to_id("<0xFF>")
    detokenizer = window_detokenizer()
    shown = [detokenizer.feed([byte]) for _ in range(12)]
    assert sum(map(len, shown)) >= 8


def test_ids_beyond_the_tokenizer_have_no_text():
    assert pieces_of(byte_detokenizer(), [len(TABLE) + 5]) == ["", ""]


def test_token_bytes_join_to_the_text():
    ids = encode(BYTE_LEVEL, TEXT)
    assert b"".join(TABLE[i] for i in ids).decode() == TEXT
    table = token_bytes_table(FALLBACK, False)
    assert b"".join(table[i] for i in encode(FALLBACK, TEXT)).decode() == " " + TEXT


@pytest.mark.parametrize("make", [toys.byte_level, toys.byte_fallback])
def test_some_special_tokens_are_shown_where_the_others_are_hidden(make):
    tokenizer = make()
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    ids = [tokenizer.token_to_id(text) for text in special]
    files = TokenizerFiles(toys.files(tokenizer), "f")
    with ThreadPoolExecutor(1) as threads:
        loaded = Tokenizer.load(files, threads)
        for shown in (set(), {special[1]}, {special[1], "<other>"}):
            detokenizer = loaded.detokenizer(skip_special_tokens=True, shown=shown)
            assert "".join(pieces_of(detokenizer, ids)) == "".join(text for text in special if text in shown)
        everything = loaded.detokenizer(skip_special_tokens=False, shown={special[1]})
        assert "".join(pieces_of(everything, ids)) == "".join(special)
