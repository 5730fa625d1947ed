"""A worker does not trust routers: what cannot be run ends at once, naming field, value and limit; the rest goes on."""

import math

import pytest
from google.rpc import code_pb2

from common import bounds
from fissile.v1 import (
    BeamSearch,
    CompositeGrammar,
    FinishReason,
    GrammarPart,
    LogitBias,
    SamplingParams,
    Sequence,
    StructuredOutput,
    TokenSequence,
)
from tests.worker.harness import connect, expected, fault, group, ids_of, quiet, run_all, run_worker, sequence

ERROR, LENGTH = FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_LENGTH


def composite(*constraints):
    parts = [GrammarPart(name="p", constraint=constraint) for constraint in constraints]
    return StructuredOutput(composite=CompositeGrammar(grammar="start: @p", parts=parts))


ONE_TOKEN = TokenSequence(token_ids=[1])
BAD = [
    ({"prompt_token_ids": []}, "prompt_token_ids: is []; at least 1 token is needed"),
    ({"prompt_token_ids": [1, 100]}, "prompt_token_ids: token id 100 is not below the vocabulary size 100"),
    ({"generated": (7, 100)}, "sequences[0].token_ids: token id 100 is not below the vocabulary size 100"),
    ({"max_tokens": 0}, "max_tokens: is 0; at least 1 is needed"),
    ({"max_tokens": 2, "generated": (7, 8)}, "max_tokens: is 2; at least 3: 2 are generated already is needed"),
    ({"min_tokens": 5}, "min_tokens: is 5; at most max_tokens (4) is needed"),
    ({"stop_token_ids": [4, 100]}, "stop_token_ids: token id 100 is not below the vocabulary size 100"),
    ({"stop_token_sequences": [TokenSequence()]}, "stop_token_sequences[0].token_ids: is 0 long; 1 to 256 is needed"),
    (
        {"stop_token_sequences": [TokenSequence(token_ids=[1]), TokenSequence(token_ids=[2, 100])]},
        "stop_token_sequences[1].token_ids: token id 100 is not below the vocabulary size 100",
    ),
    ({"stop_token_ids": [1] * 1041}, "stop_token_ids: is 1041 long; at most 1040 is needed"),
    ({"stop_token_sequences": [ONE_TOKEN] * 65}, "stop_token_sequences: is 65 long; at most 64 is needed"),
    ({"cache_salt": b"s" * 257}, "cache_salt: is 257 bytes long; at most 256 is needed"),
]
BAD_SAMPLING = [
    ({"temperature": -0.5}, "sampling.temperature: is -0.5; 0 to 100 is needed"),
    ({"temperature": 101}, "sampling.temperature: is 101.0; 0 to 100 is needed"),
    ({"temperature": math.nan}, "sampling.temperature: is nan; 0 to 100 is needed"),
    ({"top_k": -2}, "sampling.top_k: is -2; −1 or more is needed"),
    ({"top_p": 0}, "sampling.top_p: is 0.0; above 0, at most 1 is needed"),
    ({"top_p": 2}, "sampling.top_p: is 2.0; above 0, at most 1 is needed"),
    ({"top_p": math.nan}, "sampling.top_p: is nan; above 0, at most 1 is needed"),
    ({"min_p": 1.5}, "sampling.min_p: is 1.5; 0 to 1 is needed"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty: is 2.5; −2 to 2 is needed"),
    ({"frequency_penalty": -2.5}, "sampling.frequency_penalty: is -2.5; −2 to 2 is needed"),
    ({"presence_penalty": math.nan}, "sampling.presence_penalty: is nan; −2 to 2 is needed"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty: is 0.0; above 0, at most 2 is needed"),
    (
        {"logit_bias": [LogitBias(token_id=100)]},
        "sampling.logit_bias[0].token_id: token id 100 is not below the vocabulary size 100",
    ),
    (
        {"logit_bias": [LogitBias(token_id=1, bias=math.inf)]},
        "sampling.logit_bias[0].bias: is inf; −100 to 100 is needed",
    ),
    (
        {"logit_bias": [LogitBias(token_id=1), LogitBias(token_id=1)]},
        "sampling.logit_bias[1].token_id: is 1; each token once is needed",
    ),
    ({"allowed_token_ids": [3, 100]}, "sampling.allowed_token_ids: token id 100 is not below the vocabulary size 100"),
    ({"banned_token_ids": [100]}, "sampling.banned_token_ids: token id 100 is not below the vocabulary size 100"),
    (
        {"bad_token_sequences": [TokenSequence()]},
        "sampling.bad_token_sequences[0].token_ids: is 0 long; 1 to 128 is needed",
    ),
    (
        {"bad_token_sequences": [ONE_TOKEN] * 513},
        "sampling.bad_token_sequences: is 513 long; at most 512 is needed",
    ),
    ({"num_logprobs": 65}, "sampling.num_logprobs: is 65; 0 to 64 is needed"),
    ({"num_prompt_logprobs": 65}, "sampling.num_prompt_logprobs: is 65; 0 to 64 is needed"),
    (
        {"logit_bias": [LogitBias(token_id=i) for i in range(1025)]},
        "sampling.logit_bias: is 1025 long; at most 1024 is needed",
    ),
    ({"structured_output": StructuredOutput()}, "sampling.structured_output: one constraint is needed"),
    (
        {"structured_output": StructuredOutput(regex="")},
        "sampling.structured_output.regex: is empty; some text is needed",
    ),
    (
        {"structured_output": StructuredOutput(json_object=False)},
        "sampling.structured_output.json_object: is False; true, where it is set is needed",
    ),
    (
        {"structured_output": composite(StructuredOutput(regex="a"), StructuredOutput(regex="b"))},
        "sampling.structured_output.composite.parts[1].name: is 'p'; a name of its own is needed",
    ),
    (
        {"structured_output": composite(StructuredOutput(composite=CompositeGrammar()))},
        "sampling.structured_output.composite.parts[0].constraint: is composite; any other constraint is needed",
    ),
    (
        {"structured_output": composite(StructuredOutput(regex=""))},
        "sampling.structured_output.composite.parts[0].constraint.regex: is empty; some text is needed",
    ),
    ({"beam_search": BeamSearch(width=1)}, "sampling.beam_search.width: is 1; 2 to 16 is needed"),
    ({"beam_search": BeamSearch(width=17)}, "sampling.beam_search.width: is 17; 2 to 16 is needed"),
    (
        {"beam_search": BeamSearch(width=2, length_penalty=math.inf)},
        "sampling.beam_search.length_penalty: is inf; a finite number is needed",
    ),
]
NOT_WITH_BEAMS = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.5},
    {"logit_bias": [LogitBias(token_id=1, bias=1)]},
    {"allowed_token_ids": [1]},
    {"banned_token_ids": [1]},
    {"bad_token_sequences": [TokenSequence(token_ids=[1])]},
    {"num_logprobs": 0},
    {"num_prompt_logprobs": 0},
    {"structured_output": StructuredOutput(regex="a")},
]


def run_with_a_good_one(*bad, **settings):
    """Bad ones and a good one in one message, then another good one: the stream goes on."""
    good, later = sequence(1000), sequence(1001)

    async def scenario(system):
        router = connect(system)
        await router.send(*bad, good)
        await router.finish(*(id for message in bad for id in ids_of(message)), 1000)
        await router.send(later)
        await router.finish(1001)
        await quiet(system)
        return router

    router = run_worker(scenario, **settings)
    assert router.tokens[1000] == expected(good, 4)
    assert router.tokens[1001] == expected(later, 4)
    return router


def test_each_bad_field_is_named():
    bad = [sequence(id, **fields) for id, (fields, _) in enumerate(BAD, start=1)]
    bad += [
        sequence(id, sampling=SamplingParams(**fields))
        for id, (fields, _) in enumerate(BAD_SAMPLING, start=len(BAD) + 1)
    ]
    router = run_with_a_good_one(*bad)
    ends = {id: router.ended[id] for id in range(1, len(bad) + 1)}
    assert [fault(end) for end in ends.values()] == [text for _, text in BAD + BAD_SAMPLING]
    assert {end.finish_reason for end in ends.values()} == {ERROR}
    assert {end.error_code for end in ends.values()} == {code_pb2.INVALID_ARGUMENT}


def test_what_does_not_go_with_beams_is_named():
    beams = BeamSearch(width=2)
    bad = [
        sequence(id, sampling=SamplingParams(beam_search=beams, **fields))
        for id, fields in enumerate(NOT_WITH_BEAMS, start=1)
    ]
    router = run_with_a_good_one(*bad)
    for id, fields in enumerate(NOT_WITH_BEAMS, start=1):
        (field,) = fields
        assert router.ended[id].error_code == code_pb2.INVALID_ARGUMENT
        assert fault(router.ended[id]) == f"sampling.{field}: is set; none with beam_search is needed"


def test_a_grammar_ends_by_eos_alone():
    grammar = SamplingParams(structured_output=StructuredOutput(regex="a"))
    router = run_with_a_good_one(
        sequence(1, sampling=grammar, ignore_eos=True), sequence(2, sampling=grammar, ignore_eos=False, min_tokens=1)
    )
    assert fault(router.ended[1]) == "ignore_eos: is True; false with structured_output is needed"
    assert fault(router.ended[2]) == "min_tokens: is 1; 0 with structured_output is needed"


def test_id_0_is_no_id():
    router = run_with_a_good_one(sequence(0))
    assert fault(router.ended[0]) == "sequences[0].id: is 0; 1 or more is needed"


@pytest.mark.parametrize(("length", "good"), [(62, True), (63, True), (64, False), (65, False)])
def test_prompts_about_as_long_as_the_context(length, good):
    """Case 9: the last token of the context must be generated."""
    router = run_with_a_good_one(sequence(1, length))
    end = router.ended[1]
    if good:
        assert (len(router.tokens[1]), end.error_code) == (64 - length, 0)
    else:
        assert (end.error_code, end.finish_reason) == (code_pb2.INVALID_ARGUMENT, ERROR)
        assert fault(end) == (
            f"prompt_token_ids: the prompt has {length} tokens; with room for one more the model takes at most 63"
        )


@pytest.mark.parametrize(
    ("message", "settings", "numbers"),
    [
        (sequence(1, 40), {"num_blocks": 2}, ("40", "2")),
        (sequence(1, 20), {"max_num_batched_tokens": 16, "max_num_seqs": 4}, ("20", "16")),
        (sequence(1, 5, max_tokens=50), {"num_blocks": 2}, ("50", "2")),
    ],
    ids=["prompt beyond the pool", "prompt beyond the step", "max_tokens beyond the pool"],
)
def test_what_can_never_run_is_refused_at_once_with_numbers(message, settings, numbers):
    """Case 6: it does not block those behind it."""
    end = run_with_a_good_one(message, **settings).ended[1]
    assert (end.finish_reason, end.error_code) == (ERROR, code_pb2.INVALID_ARGUMENT)
    assert all(number in end.detail for number in numbers)


def test_a_full_queue_refuses():
    """RESOURCE_EXHAUSTED tells the router to try elsewhere; those in the queue are served."""
    messages = [sequence(id, max_tokens=2) for id in range(1, 9)]

    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(*messages)
        system.executor.open.set()
        await router.finish(*range(1, 9))
        await quiet(system)
        return router, system.server._registry

    router, registry = run_worker(scenario, max_num_seqs=1, max_num_waiting=3, served_model_name=["toy"])
    refused = [id for id, end in router.ended.items() if end.finish_reason == ERROR]
    assert sorted(refused) == [4, 5, 6, 7, 8]
    assert {router.ended[id].error_code for id in refused} == {code_pb2.RESOURCE_EXHAUSTED}
    assert router.ended[4].detail == "3 sequences are waiting, the limit is 3"
    for end, num in (("length", 3), ("refused_resource_exhausted", 5)):
        assert registry.get_sample_value("fissile_worker_sequences_total", {"model": "toy", "end": end}) == num


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ({"index": 1}, "sequences: is one with an index twice; each index once is needed"),
        ({"token_ids": [1, 100]}, "sequences[2].token_ids: token id 100 is not below the vocabulary size 100"),
        ({"token_ids": [1, 2, 3, 4]}, "max_tokens: is 4; at least 5: 4 are generated already is needed"),
    ],
)
def test_a_group_is_admitted_as_a_whole_or_not_at_all(last, text):
    members = [Sequence(id=1), Sequence(id=2, index=1), Sequence(**({"id": 3, "index": 2} | last))]
    router = run_with_a_good_one(group(members))
    assert [fault(router.ended[id]) for id in (1, 2, 3)] == [text] * 3
    assert [router.ended[id].index for id in (1, 2, 3)] == [member.index for member in members]


def test_a_group_has_at_most_128_sequences():
    router = run_with_a_good_one(group([Sequence(id=2000 + i, index=i) for i in range(129)]))
    assert fault(router.ended[2000]) == "sequences: is 129 long; 1 to 128 is needed"


def test_a_groups_prompts_are_bounded_together(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_FANOUT_TOKENS", 19)
    router = run_with_a_good_one(group(4, prompt=5))
    assert fault(router.ended[1]) == "sequences: is 20 prompt tokens together; at most 19 is needed"


def test_an_id_twice_in_a_group_has_one_end():
    """Two could not be told apart."""
    router = run_with_a_good_one(group([Sequence(id=5, index=index) for index in range(2)]))
    assert fault(router.ended[5]) == "sequences: is one with an id twice; each id once is needed"


def test_beams_are_no_group():
    router = run_with_a_good_one(group(2, sampling=SamplingParams(beam_search=BeamSearch(width=2))))
    assert fault(router.ended[2]) == "sequences: is 2 long; 1 with beam_search is needed"


def test_many_refusals_share_a_message():
    """One request brings 128; they are no reason to think that the reader is behind (E4)."""
    bad = [group([Sequence(id=1 + 128 * k + i, index=i) for i in range(128)], min_tokens=2**32 - 1) for k in range(30)]
    good = sequence(9000, max_tokens=20)

    async def scenario(system):
        router = connect(system)
        await router.send(good)
        await router.read_tokens(9000, 1)
        system.executor.open.clear()
        await router.send(*bad)
        await router.finish(*range(1, 3841))
        system.executor.open.set()
        await router.finish(9000)
        await quiet(system)
        return router

    router = run_worker(scenario, max_queued_messages=40)
    assert {router.ended[id].field for id in range(1, 3841)} == {"min_tokens"}
    assert router.tokens[9000] == expected(good, 20)


def test_a_group_larger_than_the_queue_is_refused_as_a_whole():
    """Case 60."""
    router = run_with_a_good_one(group(3), max_num_waiting=2)
    assert {router.ended[id].error_code for id in (1, 2, 3)} == {code_pb2.RESOURCE_EXHAUSTED}


def test_an_id_in_use_again_ends_both_uses_and_no_other():
    """Their outputs could not be told apart."""

    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        other = sequence(2, max_tokens=6)
        await router.send(sequence(1, max_tokens=50), other)
        await router.send(sequence(1, max_tokens=50))
        system.executor.open.set()
        await router.finish(1, 2)
        await quiet(system)
        return router, expected(other, 6), system.server._engine.load.num_generated_tokens

    router, other, num_generated = run_worker(scenario)
    assert num_generated < 6 + 50, "the first use goes on unheard"
    assert (router.ended[1].finish_reason, router.ended[1].error_code) == (ERROR, code_pb2.ALREADY_EXISTS)
    assert (router.tokens[2], router.ended[2].finish_reason) == (other, LENGTH)


def test_a_row_that_is_not_finite_ends_with_an_internal_error():
    async def scenario(system):
        system.executor.runner.failing_slots.update(range(64))
        router = await run_all(system, sequence(1))
        await quiet(system)
        return router

    end = run_worker(scenario, async_scheduling=False).ended[1]
    assert (end.finish_reason, end.error_code) == (ERROR, code_pb2.INTERNAL)
    assert "not finite" in end.detail
