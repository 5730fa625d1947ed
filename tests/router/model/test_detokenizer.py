"""Joined pieces equal decoding the whole; no piece ends inside a character."""

import codecs
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.model.detokenizer import (
    MAX_HELD_BYTES,
    ByteDetokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
    last_shown,
)
from router.model.tokenizer import Tokenizer, TokenizerFiles
from router.model.vocabulary import byte_tokens, decoder_types, is_byte_level, token_bytes_table
from tests.fakes import tokenizer as toys

TEXT = "naïve 😀 漢字 text\n\n  é"
BYTE_LEVEL = toys.byte_level()
FALLBACK = toys.byte_fallback()
TABLE = token_bytes_table(BYTE_LEVEL.get_vocab(), True)


def byte_detokenizer():
    return ByteDetokenizer(TABLE)


BYTE_OF = byte_tokens(decoder_types(FALLBACK.to_str().encode()), FALLBACK.get_vocab())
FIRST_BYTE = FALLBACK.token_to_id("<0x00>")


PARIS, IS, A = (FALLBACK.token_to_id(piece) for piece in ("▁Paris", "▁is", "a"))


def decode(ids):
    return FALLBACK.decode(ids, skip_special_tokens=False)


def window_detokenizer(hidden=frozenset(), prompt=()):
    return FallbackDetokenizer(decode, BYTE_OF, hidden, last_shown(prompt, hidden))


def byte_ids(data):
    return [FIRST_BYTE + byte for byte in data]


def pieces_of(detokenizer, ids, size=1):
    pieces = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_which_tokenizers_are_byte_level():
    assert is_byte_level(decoder_types(BYTE_LEVEL.to_str().encode()))
    assert not is_byte_level(decoder_types(FALLBACK.to_str().encode()))
    assert not is_byte_level(decoder_types(b'{"decoder": null}'))
    assert byte_tokens(["ByteLevel"], FALLBACK.get_vocab()) == {}
    assert (len(BYTE_OF), BYTE_OF[FIRST_BYTE + 0x41]) == (256, 0x41)


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


BYTES = [0x61, 0xFF, *"漢".encode(), *"é".encode(), 0x20]
RUNS = st.lists(st.sampled_from([*byte_ids(BYTES), PARIS, IS, A, 0, 1, 2]), max_size=24)


def one_shot(ids, prompt=(), *, hidden=frozenset()):
    """What the ids add to the prompt, by the tokenizer's own decoder. A character that is cut off at the end does not
    spoil the run that it is in."""
    visible = [i for i in ids if i not in hidden]
    run = bytes(BYTE_OF[i] for i in reversed(list(takewhile(BYTE_OF.__contains__, reversed(visible)))))
    with suppress(UnicodeDecodeError):
        num_cut = len(run) - codecs.utf_8_decode(run, "strict", False)[1]
        visible = visible[: len(visible) - num_cut]
        before = [i for i in prompt if i not in hidden]
        return decode([*before, *visible]).removeprefix(decode(before)) + "\ufffd" * bool(num_cut)
    before = [i for i in prompt if i not in hidden]
    return decode([*before, *visible]).removeprefix(decode(before))


@settings(max_examples=500)
@given(RUNS, st.integers(1, 4), st.sampled_from([frozenset(), frozenset({0, 1, 2})]))
def test_any_tokens_with_byte_fallback_are_what_they_are_at_once(ids, size, hidden):
    assert "".join(pieces_of(window_detokenizer(hidden), ids, size)) == one_shot(ids, hidden=hidden)


@settings(max_examples=500)
@given(RUNS, RUNS, st.sampled_from([frozenset(), frozenset({0, 1, 2})]))
def test_any_tokens_add_what_they_add_to_the_prompt(prompt, ids, hidden):
    prompt.append(PARIS)  # a run of bytes belongs to the prompt or to the answer
    detokenizer = window_detokenizer(hidden, prompt)
    assert "".join(pieces_of(detokenizer, ids)) == one_shot(ids, prompt, hidden=hidden)


def test_nothing_after_a_broken_run_is_lost():
    ids = [*byte_ids(b"\xff" + "漢漢漢".encode()), A]
    assert "".join(pieces_of(window_detokenizer(), ids)) == "\ufffd" * 10 + "a"


def test_a_space_between_prompt_and_answer_is_kept():
    rome = [PARIS]
    assert "".join(pieces_of(window_detokenizer(prompt=[A, IS]), rome * 2)) == " Paris Paris"
    assert "".join(pieces_of(window_detokenizer(), rome * 2)) == "Paris Paris"
    bos, eos = FALLBACK.token_to_id("<s>"), FALLBACK.token_to_id("</s>")
    assert "".join(pieces_of(window_detokenizer({bos}, [bos]), rome)) == "Paris"
    assert "".join(pieces_of(window_detokenizer({bos, eos}, [bos, *rome, eos]), rome)) == " Paris"
    assert "".join(pieces_of(window_detokenizer(prompt=[bos]), rome)) == " Paris"


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_character_that_the_prompt_has_begun_is_whole_in_the_answer(num_before):
    fallback, level = byte_ids("漢".encode()), encode(BYTE_LEVEL, "漢")
    detokenizer = window_detokenizer(prompt=fallback[:num_before])
    assert "".join(pieces_of(detokenizer, fallback[num_before:])) == "漢"
    detokenizer = ByteDetokenizer(TABLE, last_shown(level[:num_before], frozenset()))
    assert "".join(pieces_of(detokenizer, level[num_before:])) == "漢"


def test_a_long_run_in_the_prompt_may_begin_anywhere():
    detokenizer = window_detokenizer(prompt=byte_ids("漢".encode() * 40))
    assert "".join(pieces_of(detokenizer, byte_ids("漢é".encode()))) == "漢é"


def test_a_long_run_is_shown_as_it_comes():
    detokenizer = window_detokenizer()
    pieces = pieces_of(detokenizer, byte_ids("漢".encode() * 60))
    assert "".join(pieces) == "漢" * 60
    assert all(len(piece) <= 1 for piece in pieces[MAX_HELD_BYTES + 3 :])


def as_it_comes(ids):
    """Behind a prompt: whole characters of each run up to the byte that breaks it, and U+FFFD for each one after."""
    text, run = "", bytearray()
    for i in [*ids, None]:
        if i in BYTE_OF:
            run.append(BYTE_OF[i])
            continue
        try:
            num_whole = codecs.utf_8_decode(run, "strict", False)[1]
            num_lost = min(1, len(run) - num_whole) if i is None else len(run) - num_whole
        except UnicodeDecodeError as error:
            num_whole = error.start
            num_lost = len(run) - num_whole
        text += run[:num_whole].decode() + "\ufffd" * num_lost
        run.clear()
        text += FALLBACK.id_to_token(i).replace("▁", " ") if i is not None else ""
    return text


@settings(max_examples=500)
@given(RUNS, st.integers(1, 4))
def test_an_eager_one_returns_each_character_with_the_token_that_completes_it(ids, size):
    detokenizer = FallbackDetokenizer(decode, BYTE_OF, prompt=[PARIS], is_eager=True)
    assert "".join(pieces_of(detokenizer, ids, size)) == as_it_comes(ids)
    detokenizer, shown = FallbackDetokenizer(decode, BYTE_OF, prompt=[PARIS], is_eager=True), ""
    for num, token_id in enumerate(ids, 1):
        shown += detokenizer.feed([token_id])
        assert as_it_comes(ids[:num]) in (shown, shown + "\ufffd")


def test_an_eager_one_loses_the_blank_that_begins_a_text_and_no_other():
    for ids in ([0x20, 0x20, 0x61], [0x20], [0x20, 0xC3, 0xA9]):
        detokenizer = FallbackDetokenizer(decode, BYTE_OF, is_eager=True)
        assert "".join(pieces_of(detokenizer, byte_ids(ids))) == decode(byte_ids(ids))


LOSSY = toys.byte_level()


@given(st.lists(st.integers(0, len(TABLE) - 1), max_size=20), st.integers(1, 4))
def test_a_window_over_bytes_is_exact_for_any_tokens(ids, size):
    """Byte-level decoding with a step before it: no table of bytes tells the text."""
    detokenizer = WindowDetokenizer(lambda ids: LOSSY.decode(ids, skip_special_tokens=False))
    assert "".join(pieces_of(detokenizer, ids, size)) == LOSSY.decode(ids, skip_special_tokens=False)


PARTS = st.sampled_from([TABLE.index(bytes([byte])) for byte in (0x61, 0xFF, *"漢é😀".encode())])


@settings(max_examples=500)
@given(st.lists(PARTS, max_size=6), st.lists(PARTS, min_size=1, max_size=6))
def test_a_window_shows_nothing_of_the_prompt(prompt, ids):
    """vllm#48853. What is broken in the prompt is the prompt's; a character that it has begun is the answer's."""
    detokenizer = WindowDetokenizer(lambda ids: LOSSY.decode(ids, skip_special_tokens=False), prompt=prompt)
    before, whole = (LOSSY.decode(ids, skip_special_tokens=False) for ids in (prompt, [*prompt, *ids]))
    num_before = max(
        len(before.rstrip("\ufffd")),
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))),
    )
    assert "".join(pieces_of(detokenizer, ids)) == whole[num_before:]


def test_a_window_over_endless_broken_bytes_stays_short():
    (byte,) = (i for i, data in enumerate(TABLE) if data == b"\xff")
    detokenizer = WindowDetokenizer(lambda ids: LOSSY.decode(ids, skip_special_tokens=False))
    ids = [byte] * 300 + encode(LOSSY, "a")
    assert "".join(pieces_of(detokenizer, ids)) == "\ufffd" * 300 + "a"
    assert len(detokenizer._ids) < 100


def test_ids_beyond_the_tokenizer_have_no_text():
    assert pieces_of(byte_detokenizer(), [len(TABLE) + 5]) == ["", ""]


def test_token_bytes_join_to_the_text():
    ids = encode(BYTE_LEVEL, TEXT)
    assert b"".join(TABLE[i] for i in ids).decode() == TEXT
    table = token_bytes_table(FALLBACK.get_vocab(), False)
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
            make = loaded.detokenizers([], skip_special_tokens=True, shown=shown)
            assert "".join(pieces_of(make(), ids)) == "".join(text for text in special if text in shown)
        everything = loaded.detokenizers([], skip_special_tokens=False, shown={special[1]})
        assert "".join(pieces_of(everything(), ids)) == "".join(special)
