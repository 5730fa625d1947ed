"""From a client's options to a worker's own values: nothing that concerns the worker is lost or changed."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import bounds
from fissile.channel import MAX_MESSAGE_BYTES
from fissile.errors import InvalidArgumentError
from fissile.v1 import (
    AbortSequence,
    ChatMessage,
    ChatRequest,
    ExecuteCommand,
    GenerateRequest,
    GenerationOptions,
    GetWorkerResponse,
    OutputOptions,
    SamplingParams,
    Sequence,
    SequenceGroup,
    TokenSequence,
)
from router.asking.bad_words import bad_token_sequences
from router.asking.checks import Limits
from router.asking.resolve import resolve
from router.asking.spec import Prompt
from router.asking.validation import validate
from router.fleet.outbox import ABORT_BYTES, MAX_BATCH_BYTES, MAX_COMMAND_BYTES, batches
from router.model.served import ServedVersion, Version
from router.model.tokenizer import Tokenizer, TokenizerFiles
from tests.fakes import tokenizer as toys
from tests.router import messages
from worker.core import params
from worker.face.convert_group import ModelLimits, group_from_pb

MAX_MODEL_LEN = 1024
LIMITS = Limits(messages.VOCAB_SIZE, MAX_MODEL_LEN, 10_000, dp_size=2)
WORKER_LIMITS = ModelLimits(
    vocab_size=messages.VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    block_size=16,
    num_blocks=1000,
    eos_token_ids=frozenset({2, 9}),
)
PROMPT = Prompt("text", [5, 6, 7])


@pytest.fixture(scope="module")
def model():
    """As a router knows it."""
    with ThreadPoolExecutor(1) as executor:
        tokenizer = Tokenizer.load(TokenizerFiles(toys.files(toys.byte_level()), "f"), executor)
        info = GetWorkerResponse(
            vocab_size=messages.VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, capabilities=["beam_search"]
        )
        yield ServedVersion("toy", Version.of(info), info, tokenizer, 1)


def sent(options: GenerationOptions, model: ServedVersion, index=0, generated=()) -> tuple[SequenceGroup, list]:
    """The group of one that a worker gets, and the token sequences of the bad words."""
    bad = asyncio.run(bad_token_sequences(options.bad_words, model.tokenizer))
    spec = resolve(
        options, served=model, request_id="r", prompt=PROMPT, bad_token_sequences=bad, cache_salt=options.cache_salt
    )
    group = spec.group({index: generated}, asks_prompt_logprobs=spec.wants_prompt_logprobs, deadline=1.5)
    group.sequences[0].id = 1
    return group, bad


def test_the_strategies_know_every_field():
    def names(message):
        return set(message.DESCRIPTOR.fields_by_name)

    sampling = messages.SAMPLING.keys() | messages.BEAM_SAMPLING.keys() | messages.ONLY_GENERATE.keys()
    options = messages.OPTIONS.keys() | messages.NOT_WITH_BEAMS.keys() | messages.NOT_WITH_GRAMMARS.keys()
    assert names(SamplingParams) == sampling
    assert names(GenerationOptions) == options | {"sampling"}
    assert names(OutputOptions) == messages.OUTPUT.keys()


@settings(max_examples=60)
@given(options=messages.options())
def test_every_field_of_the_options_reaches_the_group(model, options):
    validate(GenerateRequest(text="a", options=options), LIMITS)
    group, bad = sent(options, model)
    for field in SamplingParams.DESCRIPTOR.fields:
        wanted, got = getattr(options.sampling, field.name), getattr(group.sampling, field.name)
        if field.name == "seed":
            assert group.sequences[0].seed == wanted or not options.sampling.HasField("seed")
            continue
        if field.name == "bad_token_sequences":
            assert list(got) == [*wanted, *bad]
        elif field.name == "top_k":
            assert got == max(0, wanted)
        elif not field.has_presence or options.sampling.HasField(field.name):
            assert got == wanted, field.name
    for name in ("stop_token_sequences", "min_tokens", "ignore_eos", "priority", "cache_salt"):
        assert getattr(group, name) == getattr(options, name), name
    assert set(options.stop_token_ids) <= set(group.stop_token_ids)
    assert group.HasField("max_tokens") == options.HasField("max_tokens")
    assert group.max_tokens == options.max_tokens
    assert list(group.prompt_token_ids) == PROMPT.token_ids
    assert (group.request_id, group.deadline_ms) == ("r", 1500)


@settings(max_examples=60)
@given(options=messages.options())
def test_the_group_survives_the_wire_and_the_worker_reads_the_same_values(model, options):
    group, _ = sent(options, model)
    message = SequenceGroup.FromString(group.SerializeToString())
    assert message == group
    (core,) = group_from_pb(message, [7], WORKER_LIMITS)
    (member,) = message.sequences
    assert sampling_of(core.sampling) == sampling_of_message(message.sampling) | {"seed": member.seed}
    assert list(core.token_ids) == list(message.prompt_token_ids)
    assert (core.priority, core.cache_salt, core.index) == (message.priority, message.cache_salt, member.index)
    assert core.stop.max_tokens == (message.max_tokens if message.HasField("max_tokens") else None)
    assert core.stop.min_tokens == message.min_tokens
    assert core.stop.stop_token_ids == frozenset(message.stop_token_ids)
    assert core.stop.stop_token_sequences == tuple(tuple(s.token_ids) for s in message.stop_token_sequences)
    assert core.stop.eos_token_ids == (frozenset() if message.ignore_eos else WORKER_LIMITS.eos_token_ids)
    if message.sampling.HasField("beam_search"):
        beam = message.sampling.beam_search
        length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
        assert core.beam == params.BeamParams(
            width=beam.width, length_penalty=length_penalty, early_stopping=beam.early_stopping
        )
    else:
        assert core.beam is None


def test_a_worker_takes_the_most_of_everything_that_a_router_lets_through(model):
    sequences = [TokenSequence(token_ids=[3] * bounds.MAX_STOP_SEQUENCE_TOKENS)] * bounds.MAX_STOP_SEQUENCES
    bad = [TokenSequence(token_ids=[i + 1] * bounds.MAX_BAD_SEQUENCE_TOKENS) for i in range(bounds.MAX_BAD_SEQUENCES)]
    options = GenerationOptions(
        sampling=SamplingParams(bad_token_sequences=bad, num_logprobs=int(bounds.NUM_LOGPROBS.high)),
        stop=[f"stop {i}" for i in range(bounds.MAX_STOPS)],
        stop_token_ids=range(1, bounds.MAX_STOP_TOKENS + 1),
        stop_token_sequences=sequences,
        bad_words=[chr(ord("!") + i) for i in range(bounds.MAX_BAD_WORDS)],
        cache_salt=b"s" * bounds.MAX_SALT_BYTES,
    )
    large = Limits(vocab_size=2000, max_model_len=MAX_MODEL_LEN, max_prompt_bytes=100)
    validate(GenerateRequest(text="a", options=options), large)
    group, _ = sent(options, model)
    group.sequences.extend(Sequence(id=i, index=i) for i in range(2, int(bounds.N.high) + 1))
    assert len(group_from_pb(group, range(7, 7 + 128), replace(WORKER_LIMITS, vocab_size=2000))) == 128


def test_the_prompts_of_all_completions_are_bounded_together(model, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_FANOUT_TOKENS", 3 * len(PROMPT.token_ids))
    sent(GenerationOptions(n=3), model)
    with pytest.raises(InvalidArgumentError, match=r"options.n: n × prompt tokens must not exceed 9"):
        sent(GenerationOptions(n=4), model)


def sampling_of(core: params.SamplingParams) -> dict:
    return {field.name: getattr(core, field.name) for field in fields(core)}


def sampling_of_message(message: SamplingParams) -> dict:
    """What the core must have read of a message in which the router has filled in every default."""
    result = {name: getattr(message, name) for name in ("temperature", "top_k", "top_p", "min_p")} | {
        "presence_penalty": message.presence_penalty,
        "frequency_penalty": message.frequency_penalty,
        "repetition_penalty": message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        "logit_bias": tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        "allowed_token_ids": tuple(message.allowed_token_ids),
        "banned_token_ids": tuple(message.banned_token_ids),
        "bad_token_sequences": tuple(dict.fromkeys(tuple(s.token_ids) for s in message.bad_token_sequences)),
        "num_logprobs": message.num_logprobs if message.HasField("num_logprobs") else None,
        "num_prompt_logprobs": message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        "grammar": None,
    }
    if message.HasField("structured_output"):
        kind = message.structured_output.WhichOneof("constraint")
        text = getattr(message.structured_output, kind)
        if kind == "choice":
            text = json.dumps(list(text.choices))
        result["grammar"] = params.Grammar(params.GrammarKind(kind), "" if kind == "json_object" else text)
    return result


@settings(max_examples=20)
@given(options=messages.options(for_chat=True))
def test_a_chats_options_are_as_valid(options):
    validate(ChatRequest(messages=[ChatMessage(role=2, content="a")], options=options), LIMITS)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 127), generated=st.lists(messages.token_ids, max_size=5))
def test_a_resumed_completion_draws_with_its_own_seed_behind_what_it_has(model, seed, index, generated):
    options = GenerationOptions(sampling=SamplingParams(seed=seed), max_tokens=10)
    group, _ = sent(options, model, index, generated)
    (core,) = group_from_pb(group, [7], WORKER_LIMITS)
    assert core.sampling.seed == (seed + index) % 2**64
    assert list(core.token_ids) == [*PROMPT.token_ids, *generated]
    assert (core.num_prompt_tokens, core.index, core.stop.max_tokens) == (3, index, 10)


def test_commands_that_wait_travel_together_but_never_above_the_limit():
    aborts = [ExecuteCommand(abort=AbortSequence(sequence_id=i)) for i in range(6)]
    sizes = [MAX_BATCH_BYTES - 1, 1, 1, 3 * MAX_BATCH_BYTES, 5, MAX_BATCH_BYTES]
    taken = list(batches(list(zip(aborts, sizes, strict=True))))
    assert [[command.abort.sequence_id for command in batch] for batch in taken] == [[0, 1], [2], [3], [4], [5]]
    assert MAX_BATCH_BYTES < MAX_COMMAND_BYTES < MAX_MESSAGE_BYTES


def test_an_abort_is_as_long_as_is_counted():
    assert ExecuteCommand(abort=AbortSequence(sequence_id=2**64 - 1)).ByteSize() <= ABORT_BYTES
