"""Texts that must not come, as token sequences."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from fissile.errors import InvalidArgumentError
from fissile.v1 import GenerateRequest, GenerationOptions, SamplingParams, TokenSequence
from router.asking.bad_words import bad_token_sequences
from router.model.tokenizer import Tokenizer, TokenizerFiles
from tests.fakes import tokenizer as toys
from tests.fakes.system import error_of, run_system
from tests.fakes.worker import FakeWorker, says


def ids_of(text):
    return toys.byte_level().encode(text, add_special_tokens=False).ids


def sequences_of(*words, made_from=toys.byte_level):
    with ThreadPoolExecutor(1) as executor:
        tokenizer = Tokenizer.load(TokenizerFiles(toys.files(made_from()), "f"), executor)
        return [list(s.token_ids) for s in asyncio.run(bad_token_sequences(words, tokenizer))]


def test_a_word_is_bad_at_the_beginning_and_after_a_space():
    assert ids_of("hello") != ids_of(" hello")
    assert sequences_of("hello") == [ids_of("hello"), ids_of(" hello")]


def test_a_word_without_its_leading_blank_is_bad_too():
    """A tokenizer that begins every text with a blank: "(na" has no blank before "na"."""
    blank, n, a = (toys.byte_fallback().token_to_id(piece) for piece in ("▁", "<0x6E>", "a"))
    assert sequences_of("na", made_from=toys.byte_fallback) == [[blank, n, a], [blank, blank, n, a], [n, a]]


def test_a_space_in_front_changes_nothing_and_equal_sequences_come_once():
    assert sequences_of(" hello", "hello") == [ids_of("hello"), ids_of(" hello")]


def test_a_word_of_spaces_is_itself():
    assert sequences_of("  ") == [ids_of("  ")]


def test_no_special_tokens_are_added_but_one_that_is_written_is_meant():
    assert sequences_of("<|im_start|>")[0] == [1]


def test_no_words_no_sequences():
    assert sequences_of() == []


def test_a_word_of_too_many_tokens_is_named():
    with pytest.raises(InvalidArgumentError, match=r"options.bad_words\[1\]: must have 1 to 128 tokens, has 129"):
        sequences_of("a", "#" * 129)


def test_they_join_the_sequences_of_the_request():
    worker = FakeWorker(says("x"))
    options = GenerationOptions(
        bad_words=["hello"], sampling=SamplingParams(bad_token_sequences=[TokenSequence(token_ids=[7, 8])])
    )

    async def scenario(system):
        await system.ask(GenerateRequest(text="a", options=options))

    run_system(scenario, worker)
    got = [list(s.token_ids) for s in worker.received[0].sampling.bad_token_sequences]
    assert got == [[7, 8], ids_of("hello"), ids_of(" hello")]


def test_a_bad_one_ends_the_request_and_nothing_stays_open():
    async def scenario(system):
        error = await error_of(system.ask(GenerateRequest(text="a", options=GenerationOptions(bad_words=["#" * 500]))))
        await system.quiet()
        return error

    assert [v.field for v in run_system(scenario, FakeWorker(says("x"))).violations] == ["options.bad_words[0]"]


def test_a_word_with_a_token_that_the_model_does_not_have_never_comes():
    """The tokenizer is larger than the vocabulary: " hello" is one of the tokens beyond it."""
    (beyond,) = ids_of(" hello")
    worker = FakeWorker(says("x"), vocab_size=beyond)

    async def scenario(system):
        await system.ask(GenerateRequest(text="a", options=GenerationOptions(bad_words=["hello"])))

    run_system(scenario, worker)
    sent = [list(sequence.token_ids) for sequence in worker.received[0].sampling.bad_token_sequences]
    assert ids_of("hello") in sent
    assert all(max(ids) < beyond for ids in sent)
