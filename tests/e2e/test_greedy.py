"""Greedy tokens through router and worker equal transformers' in float32."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.data.greedy_reference import FILE, NUM_TOKENS
from tests.soak import is_long

CASES = json.loads(FILE.read_text())["cases"]


def ours(client, prompt):
    answer = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, return_token_ids=True)
    return list(answer.result().completions[0].token_ids)


def test_the_router_tokenises_as_the_reference_did(client):
    for case in CASES:
        assert [token.id for token in client.tokenize(case["text"])] == case["prompt"], case["text"]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(0, len(CASES), 1 if is_long() else 4))
def test_alone(client, number):
    """Some of those that are answered at once below, all of them in the long version."""
    assert ours(client, CASES[number]["prompt"]) == CASES[number]["tokens"]


def test_all_at_once(client):
    with ThreadPoolExecutor(len(CASES)) as pool:
        answers = list(pool.map(lambda case: ours(client, case["prompt"]), CASES))
    assert answers == [case["tokens"] for case in CASES]
