"""Python arguments to request messages."""

import pytest

from fissile import v1
from fissile.requests import chat_request, generation_options


def test_every_option_reaches_its_field():
    options = generation_options(
        {
            "max_tokens": 1,
            "temperature": 0.0,
            "top_k": 3,
            "seed": 4,
            "logprobs": 5,
            "logit_bias": {6: -1.5},
            "stop": "x",
            "stop_token_sequences": [[7, 8]],
            "n": 2,
            "return_token_ids": True,
            "routing_key": "k",
        }
    )
    assert options == v1.GenerationOptions(
        max_tokens=1,
        sampling=v1.SamplingParams(
            temperature=0.0, top_k=3, seed=4, num_logprobs=5, logit_bias=[v1.LogitBias(token_id=6, bias=-1.5)]
        ),
        stop=["x"],
        stop_token_sequences=[v1.TokenSequence(token_ids=[7, 8])],
        n=2,
        output=v1.OutputOptions(token_ids=True),
        routing_key="k",
    )


def test_what_is_not_given_stays_unset():
    options = generation_options({})
    assert not options.HasField("max_tokens") and not options.sampling.HasField("temperature")


def test_zero_is_not_unset():
    assert generation_options({"temperature": 0.0}).sampling.HasField("temperature")


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="unknown option: max_token"):
        generation_options({"max_token": 1})


def test_an_unknown_role_is_a_value_error():
    with pytest.raises(ValueError, match="role 'robot'"):
        chat_request([{"role": "robot", "content": ""}], "", "", False, {})
