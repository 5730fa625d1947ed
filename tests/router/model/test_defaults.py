"""Sampling defaults: the request, then generation_config.json, then ours."""

import pytest

from fissile.v1 import (
    BeamHypothesis,
    BeamSearch,
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    GetModelRequest,
    RequestOutput,
    SamplingParams,
)
from router.model.defaults import default_sampling
from tests.fakes import tokenizer as toys
from tests.fakes.system import run_system
from tests.fakes.worker import FakeWorker, says

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
    assert default_sampling({}) == OURS


def test_all_that_the_model_recommends_is_taken():
    assert default_sampling(MODELS) == changed(**MODELS)


def test_what_is_null_is_not_recommended():
    assert default_sampling(dict.fromkeys(MODELS)) == OURS


@pytest.mark.parametrize(
    "config", [{"do_sample": False}, {"do_sample": True, "max_new_tokens": 5}, {"eos_token_id": [1, 2]}]
)
def test_other_entries_change_nothing(config):
    assert default_sampling(config) == OURS


def test_a_temperature_of_zero_makes_greedy_the_default():
    assert default_sampling({"temperature": 0}) == changed(temperature=0)


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
    ],
)
def test_an_invalid_value_is_not_used_and_named_in_the_log(name, value, caplog):
    assert default_sampling({**MODELS, name: value}) == changed(**{**MODELS, name: getattr(OURS, name)})
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == f"generation_config.json: ignored {name} = {value!r}"


def sequence_for(sampling, **worker):
    fake = FakeWorker(says("x"), files=toys.files(toys.byte_level(), **MODELS), **worker)

    async def scenario(system):
        await system.ask(GenerateRequest(text="a", options=GenerationOptions(sampling=sampling)))
        return (await system.stub.GetModel(GetModelRequest())).model

    model = run_system(scenario, fake)
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
