"""Sampling defaults: the request, then generation_config.json, then ours."""

import pytest

from fissile.v1 import (
    BeamHypothesis,
    BeamSearch,
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    GetModelRequest,
    LogitBias,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenSequence,
)
from router.model.defaults import MAX_BANNED, Defaults, read_defaults
from tests.fakes import tokenizer as toys
from tests.fakes.system import run_system
from tests.fakes.worker import EOS, FakeWorker, says

OURS = SamplingParams(
    temperature=1, top_k=0, top_p=1, min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1
)
MODELS = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.25}


def changed(**values):
    result = SamplingParams()
    result.CopyFrom(OURS)
    for name, value in values.items():
        setattr(result, name, value)
    return result


def test_without_a_file_ours_hold():
    assert read_defaults({}) == Defaults(OURS)


def test_all_that_the_model_recommends_is_taken():
    assert read_defaults(MODELS) == Defaults(changed(**MODELS))


def test_what_is_null_is_not_recommended():
    assert read_defaults(dict.fromkeys(MODELS)) == Defaults(OURS)


@pytest.mark.parametrize(
    "config", [{"do_sample": False}, {"do_sample": True, "max_new_tokens": 5}, {"eos_token_id": [1, 2]}]
)
def test_other_entries_change_nothing(config):
    assert read_defaults(config) == Defaults(OURS)


def test_a_temperature_of_zero_makes_greedy_the_default():
    assert read_defaults({"temperature": 0}) == Defaults(changed(temperature=0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", [0.5]),
        ("temperature", 10**400),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.5),
        ("stop_strings", [""]),
        ("stop_strings", [1]),
        ("stop_strings", ["a"] * 17),
        ("stop_strings", ["a", "\ud800"]),
        ("stop_strings", {"a": 1}),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1.5),
        ("bad_words_ids", [1]),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[1, -1]]),
        ("suppress_tokens", [True]),
        ("suppress_tokens", [1] * (MAX_BANNED + 1)),
        ("sequence_bias", {"1": 2.0}),
        ("sequence_bias", [[[1, 2], 2.0]]),
        ("sequence_bias", [[[1], 101.0]]),
        ("sequence_bias", [[[1], 1.0], [[1], 2.0]]),
        ("sequence_bias", [[1, 1.0]]),
    ],
)
def test_an_invalid_value_is_not_used_and_named_in_the_log(name, value, caplog):
    kept = {key: number for key, number in MODELS.items() if key != name}
    assert read_defaults({**MODELS, name: value}) == Defaults(changed(**kept))
    said = f"{name} = {value!r}"
    assert caplog.messages == [f"generation_config.json: ignored {said if len(said) <= 128 else said[:128] + '…'}"]


def test_lists_that_the_model_recommends_are_taken():
    config = {
        "stop_strings": "###", "min_new_tokens": 3, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8],
        "sequence_bias": [[[9], -2.0]],
    }  # fmt: skip
    rules = SamplingParams(
        logit_bias=[LogitBias(token_id=9, bias=-2)],
        banned_token_ids=[8],
        bad_token_sequences=[TokenSequence(token_ids=[5]), TokenSequence(token_ids=[6, 7])],
    )
    rules.MergeFrom(OURS)
    assert read_defaults(config) == Defaults(rules, ("###",), 3)


def ask(options, says_text="x", config=MODELS, **worker):
    """(the worker, what the client got, the model as clients see it)"""
    fake = FakeWorker(says(says_text), files=toys.files(toys.byte_level(), **config), **worker)

    async def scenario(system):
        answer = await system.ask(GenerateRequest(text="a", options=options))
        return answer, (await system.stub.GetModel(GetModelRequest())).model

    answer, model = run_system(scenario, fake)
    return fake, answer, model


def sequence_for(sampling, **worker):
    fake, _, model = ask(GenerationOptions(sampling=sampling), **worker)
    return fake.received[0].sampling, model


def test_the_request_wins_field_by_field():
    sampling, model = sequence_for(SamplingParams(temperature=0, repetition_penalty=1, seed=7))
    assert sampling == changed(**{**MODELS, "temperature": 0, "repetition_penalty": 1, "seed": 7})
    assert model.default_sampling == changed(**MODELS)


def test_top_k_of_minus_one_is_all():
    assert sequence_for(SamplingParams(top_k=-1))[0].top_k == 0


def test_beam_search_has_no_penalties_whatever_the_model_recommends():
    best = RequestOutput(
        finish_reason=FinishReason.FINISH_REASON_LENGTH,
        hypotheses=[BeamHypothesis(token_ids=[5], score=-1, finish_reason=FinishReason.FINISH_REASON_LENGTH)],
    )
    beams = SamplingParams(beam_search=BeamSearch(width=2))
    sampling, _ = sequence_for(beams, refuse=best, capabilities=["beam_search"])
    assert not any(sampling.HasField(f"{name}_penalty") for name in ("presence", "frequency", "repetition"))


RULES = {
    "stop_strings": ["lo"], "min_new_tokens": 2, "bad_words_ids": [[EOS], [6, 7], [5, 10**6]],
    "suppress_tokens": [8, 10**6], "sequence_bias": [[[9], -2.0], [[10**6], 1.0]],
}  # fmt: skip


def rules_of(sampling):
    return (
        {entry.token_id: entry.bias for entry in sampling.logit_bias},
        list(sampling.banned_token_ids),
        [list(bad.token_ids) for bad in sampling.bad_token_sequences],
    )


def test_a_models_stop_strings_and_token_rules_hold_for_who_has_none():
    """Without tokens that the model does not have; an ending token alone is no bad word."""
    worker, answer, model = ask(GenerationOptions(), "hello world", RULES)
    assert rules_of(worker.groups[0].sampling) == ({9: -2}, [8], [[6, 7]])
    assert worker.groups[0].min_tokens == 2
    assert (answer.text, answer.finishes[0].stop) == ("hel", "lo")
    assert (list(model.default_stop), model.default_min_tokens) == (["lo"], 2)
    assert rules_of(model.default_sampling)[1] == [8, 10**6]


def test_a_requests_own_stand_in_their_place():
    own = GenerationOptions(
        stop=["wor"], min_tokens=0, bad_words=["b"],
        sampling=SamplingParams(banned_token_ids=[11], logit_bias=[LogitBias(token_id=12, bias=1)]),
    )  # fmt: skip
    worker, answer, _ = ask(own, "hello world", RULES)
    bias, banned, bad = rules_of(worker.groups[0].sampling)
    assert (bias, banned, worker.groups[0].min_tokens) == ({12: 1}, [11], 0)
    assert bad and [6, 7] not in bad
    assert answer.text == "hello "


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(allowed_token_ids=[8]),
        SamplingParams(structured_output=StructuredOutput(regex="hello")),
    ],
)
def test_bans_of_the_model_never_leave_a_request_without_a_token(sampling):
    worker, *_ = ask(GenerationOptions(sampling=sampling), "hello", RULES)
    assert rules_of(worker.groups[0].sampling)[1:] == ([], [])


def test_a_grammar_says_when_an_answer_is_complete():
    constrained = SamplingParams(structured_output=StructuredOutput(regex="hello"))
    worker, answer, _ = ask(GenerationOptions(sampling=constrained), "hello", RULES)
    assert (worker.groups[0].min_tokens, answer.text) == (0, "hello")


def test_the_models_min_tokens_ends_with_max_tokens():
    assert ask(GenerationOptions(max_tokens=1), "h", RULES)[0].groups[0].min_tokens == 1
