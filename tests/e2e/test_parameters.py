"""Sampling parameters and structured output through real services, in any mix at once."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from fissile import Client
from fissile.errors import InvalidArgumentError

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The weather in the mountains is"
GREEDY = {"temperature": 0.0}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
MIX = [
    {**GREEDY},
    {**GREEDY, "repetition_penalty": 1.3, "logprobs": 2},
    {"seed": 1, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 40},
    {"seed": 2, "min_p": 0.05, "logit_bias": {260: -5.0, 28: 2.0}, "logprobs": 0},
    {"seed": 3, "top_p": 0.9, "bad_words": ["the", "very", "mountain"], "prompt_logprobs": 1},
    {"seed": 4, "json_schema": PERSON, "max_tokens": 64},
    {"seed": 5, "regex": r"[a-z]{3,8}( [a-z]{3,8}){2}", "max_tokens": 40},
    {"seed": 6, "choice": ["cold and wet", "warm", "cold"], "n": 3},
    {"seed": 7, "allowed_token_ids": list(range(1000, 2000)), "banned_token_ids": list(range(1500, 1600))},
    {"seed": 8, "min_tokens": 10, "stop": ["."]},
    {"seed": 9, "grammar": 'start: "a" DIGITS "b"\nDIGITS: /[0-9]{2,6}/'},
]


def token_ids(client, text):
    return [token.id for token in client.tokenize(text)]


def outcome(client, options):
    answer = client.generate(PROMPT, return_token_ids=True, **{"max_tokens": 16, **options}).result()
    return [(c.token_ids, c.text, c.finish) for c in answer.completions]


def test_a_mix_at_once_gives_each_what_it_gives_alone(cluster, idle):
    with Client(cluster.router_address) as client, ThreadPoolExecutor(len(MIX)) as pool:
        together = list(pool.map(lambda options: outcome(client, options), MIX))
        alone = [outcome(client, options) for options in MIX]
    assert together == alone
    texts = [[text for _, text, _ in completions] for completions in alone]
    jsonschema.validate(json.loads(texts[5][0]), PERSON)
    assert re.fullmatch(r"[a-z]{3,8}( [a-z]{3,8}){2}", texts[6][0])
    assert len(texts[7]) == 3 and set(texts[7]) <= {"cold and wet", "warm", "cold"}
    assert not re.search(r"\b(the|very|mountain)\b", texts[4][0])
    assert all(1000 <= token < 1500 or 1600 <= token < 2000 for token in alone[8][0][0])
    assert len(alone[9][0][0]) >= 10
    assert re.fullmatch(r"a[0-9]{2,6}b", texts[10][0])
    assert {completions[0][2].reason for completions in alone[5:8]} == {"eos"}
    idle()


def test_a_bias_decides_and_a_ban_forbids(client):
    (paris,) = token_ids(client, " Paris")
    usual = client.chat(CAPITAL, **GREEDY, max_tokens=16, return_token_ids=True).result().completions[0]
    assert paris in usual.token_ids
    for rule in ({"banned_token_ids": [paris]}, {"logit_bias": {paris: -100.0}}, {"bad_words": ["Paris"]}):
        changed = client.chat(CAPITAL, **GREEDY, max_tokens=16, return_token_ids=True, **rule).result().completions[0]
        assert paris not in changed.token_ids
    only = client.generate(PROMPT, **GREEDY, max_tokens=3, logit_bias={paris: 100.0}).result().completions[0]
    assert only.text == " Paris" * 3


def test_log_probabilities_of_prompt_and_answer(client):
    answer = client.generate(
        PROMPT, **GREEDY, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2, return_token_ids=True
    ).result()
    (completion,) = answer.completions
    assert len(completion.logprobs) == 4
    for token_id, (chosen, *best) in zip(completion.token_ids, completion.logprobs, strict=True):
        assert (chosen.token_id, chosen.rank) == (token_id, 1)
        assert [entry.rank for entry in best] == [1, 2, 3]
        assert best[0].logprob == pytest.approx(chosen.logprob)
    assert b"".join(chosen.text for chosen, *_ in completion.logprobs).decode() == completion.text
    assert [chosen.token_id for chosen, *_ in answer.prompt_logprobs] == token_ids(client, PROMPT)[1:]
    assert all(entry.logprob <= 0 for entries in answer.prompt_logprobs for entry in entries)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"type": "strin"}}, "options.sampling.structured_output.json_schema"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "options.sampling.structured_output"),
        ({"regex": "(a"}, "options.sampling.structured_output.regex"),
        ({"grammar": "start: missing"}, "options.sampling.structured_output.grammar"),
        ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "options.sampling.allowed_token_ids"),
        ({"logit_bias": {49152: 1.0}}, "options.sampling.logit_bias[0].token_id"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_met_is_refused_by_name(client, idle, options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate(PROMPT, max_tokens=4, **options).result()
    assert any(violation.field.startswith(field) for violation in caught.value.violations), caught.value
    idle()


def test_a_stop_string_ends_a_grammar_too(client):
    answer = client.generate(PROMPT, **GREEDY, max_tokens=40, regex="[a-z]{5}X[a-z]{20}", stop=["X"]).result()
    (completion,) = answer.completions
    assert re.fullmatch("[a-z]{5}", completion.text)
    assert (completion.finish.reason, completion.finish.stop) == ("stop_string", "X")


def test_several_prompts_in_one_call(client):
    prompts = ["One, two,", token_ids(client, "Red, green,"), "Paris is"]
    answer = client.generate(prompts, **GREEDY, max_tokens=5, ignore_eos=True).result()
    alone = [client.generate(p, **GREEDY, max_tokens=5, ignore_eos=True).result().completions[0].text for p in prompts]
    assert [c.text for c in sorted(answer.completions, key=lambda c: c.prompt_index)] == alone
    assert answer.usage.num_completion_tokens == 15
