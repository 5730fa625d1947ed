"""Every sampling parameter through scheduler and runner together, in any mix, whatever happens to the sequences."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.engine.conftest import PROMPTS
from tests.engine.loop import GREEDY, make_sequence
from tests.engine.mix import MIX as COMMON_MIX
from tests.engine.mix import NUM_TOKENS
from worker.core.params import SamplingParams, StopConditions
from worker.core.stopping import FinishReason

MIX = [
    *COMMON_MIX,
    SamplingParams(temperature=0.0, num_prompt_logprobs=0, logit_bias=((3, 2.0),)),
]


def mixed(stop=None):
    return [make_sequence(i, PROMPTS[i], NUM_TOKENS, params, stop=stop) for i, params in enumerate(MIX)]


@pytest.fixture(scope="module")
def alone(tiny):
    """What each gives by itself, synchronously, in room for all: (tokens, logprobs, prompt logprobs)."""
    results = []
    for i, params in enumerate(MIX):
        loop = tiny.loop(16)
        loop.run(make_sequence(i, PROMPTS[i], NUM_TOKENS, params))
        results.append((loop.tokens[i], loop.logprobs.get(i), loop.prompt_logprobs.get(i)))
    return results


def close(found, expected):
    """Same tokens and ranks, and log probabilities up to the order of additions."""
    if found is None or expected is None:
        return found is expected
    return [[(t, r) for t, _, r in entries[:1]] for entries in found] == [
        [(t, r) for t, _, r in entries[:1]] for entries in expected
    ] and all(
        abs(a[1] - b[1]) < 1e-4
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("block_size", "policy"), [(1, "chunked"), (16, "prefill_first")])
def test_a_mix_gives_each_what_it_gives_alone(tiny, alone, depth, mode, block_size, policy):
    """Case 36: penalties and bad words see tokens that the host has not seen. Preemption is forced."""
    loop = tiny.loop(
        block_size, num_tokens_in_cache=112, prefix="hash", async_depth=depth, preemption_mode=mode, watermark=0.0,
        scheduling_policy=policy, max_prefill_chunk=24 if policy == "chunked" else 0,
    )  # fmt: skip
    loop.run(*mixed())
    assert loop.scheduler.load().num_preemptions > 0
    for i, (tokens, logprobs, prompt_logprobs) in enumerate(alone):
        assert loop.tokens[i] == tokens
        assert close(loop.logprobs.get(i), logprobs)
        assert close(loop.prompt_logprobs.get(i), prompt_logprobs)


def test_greedy_with_penalties_bias_and_bad_words_equals_transformers(tiny):
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, logit_bias=((5, 1.0), (6, -2.0)), bad_token_sequences=((3, 4), (9,))
    )
    loop = tiny.loop(16, async_depth=1)
    loop.run(*[make_sequence(i, prompt, NUM_TOKENS, params) for i, prompt in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        processors = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}),
                RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
                NoBadWordsLogitsProcessor([list(ids) for ids in params.bad_token_sequences], eos_token_id=[]),
            ]
        )
        with torch.inference_mode():
            expected = tiny.reference_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                logits_processor=processors,
                eos_token_id=None,
                pad_token_id=130,
            )[0, len(prompt) :]
        assert loop.tokens[i] == expected.tolist()


def reference_logprobs(tiny, ids):
    with torch.inference_mode():
        return torch.log_softmax(tiny.reference_model(torch.tensor([ids])).logits[0].double(), -1)


@pytest.mark.parametrize("chunk", [0, 7])
def test_log_probabilities_equal_those_of_transformers(tiny, chunk):
    params = replace(GREEDY, num_logprobs=5, num_prompt_logprobs=5)
    policy = {"scheduling_policy": "chunked", "max_prefill_chunk": chunk} if chunk else {}
    loop = tiny.loop(16, prefix="hash", async_depth=1, **policy)
    for round in range(2):  # the second time the prompts are cached
        first = round * len(PROMPTS)
        loop.run(*[make_sequence(first + i, prompt, 6, params) for i, prompt in enumerate(PROMPTS)])
        for i, prompt in enumerate(PROMPTS, start=first):
            expected = reference_logprobs(tiny, prompt + loop.tokens[i])
            found = loop.prompt_logprobs.get(i, []) + loop.logprobs[i]
            assert len(found) == len(prompt) - 1 + 6
            for position, (chosen, *best) in enumerate(found):
                at = expected[position]
                assert chosen[0] == (prompt + loop.tokens[i])[position + 1]
                assert chosen[1] == pytest.approx(float(at[chosen[0]]), abs=1e-4)
                assert chosen[2] == int((at > at[chosen[0]]).sum()) + 1
                assert [value for _, value, _ in best] == pytest.approx(at.topk(5).values.tolist(), abs=1e-4)
                assert [rank for *_, rank in best] == [1, 2, 3, 4, 5]


def test_prompt_log_probabilities_are_not_read_from_the_cache_but_fill_it(tiny):
    prompt = PROMPTS[3]
    loop = tiny.loop(16, prefix="hash")
    loop.run(make_sequence(0, prompt, 2))
    loop.run(make_sequence(1, prompt, 2, replace(GREEDY, num_prompt_logprobs=0)))
    loop.run(make_sequence(2, prompt, 2))
    assert [loop.ended[i].num_cached_tokens for i in range(3)] == [0, 0, 32]


def test_a_group_reports_the_prompt_once(tiny):
    params = [replace(MIX[6], seed=seed) for seed in range(3)]
    prompt = PROMPTS[5]
    members = [make_sequence(1 + i, prompt, 8, p, parent_id=1 if i else None, index=i) for i, p in enumerate(params)]
    loop = tiny.loop(16, async_depth=1)
    loop.run(members)
    assert set(loop.prompt_logprobs) == {1}
    for i, sampling in enumerate(params):
        other = tiny.loop(16)
        other.run(make_sequence(0, prompt, 8, sampling))
        assert (loop.tokens[1 + i], close(loop.logprobs[1 + i], other.logprobs[0])) == (other.tokens[0], True)


@pytest.mark.parametrize("depth", [0, 1])
def test_min_tokens_keeps_both_endings_away(tiny, depth):
    """Case 44: the endings are forced by a bias; they come as soon as they may, after three other tokens."""
    stop = StopConditions(
        max_tokens=10, min_tokens=3, eos_token_ids=frozenset((20, 21)), stop_token_ids=frozenset((22,))
    )
    forced = SamplingParams(temperature=0.0, logit_bias=((20, 90.0), (21, 80.0), (22, 100.0)))
    loop = tiny.loop(16, async_depth=depth)
    loop.run(make_sequence(0, PROMPTS[2], 10, forced, stop=stop), make_sequence(1, PROMPTS[2], 10, GREEDY))
    assert (len(loop.tokens[0]), loop.tokens[0][-1]) == (4, 22)
    assert not {20, 21, 22} & set(loop.tokens[0][:3])
    assert loop.ended[0].finish_reason is FinishReason.STOP_TOKEN


def test_a_contradiction_ends_its_own_sequence(tiny):
    contradiction = SamplingParams(allowed_token_ids=(3,), banned_token_ids=(3,))
    loop = tiny.loop(16, async_depth=1)
    loop.run(make_sequence(0, PROMPTS[2], 5, contradiction), make_sequence(1, PROMPTS[2], 5, GREEDY))
    assert loop.ended[0].finish_reason is FinishReason.ERROR
    assert "leave no token" in loop.ended[0].detail
    assert loop.ended[0].is_request_fault
    assert loop.tokens[1] == tiny.references[2][:5]
