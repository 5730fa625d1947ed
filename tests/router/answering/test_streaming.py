"""What a stream carries: every mix of text, ids and log probabilities, as deltas, cumulative or only at the end."""

from itertools import product

import pytest

from fissile.v1 import (
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    SamplingParams,
)
from tests.fakes import tokenizer as toys
from tests.fakes.asked import EOS
from tests.fakes.system import run_system
from tests.fakes.worker import FakeWorker, counts, says

TEXT = " Paris 😀 naïve"
IDS = [*toys.byte_level().encode(TEXT, add_special_tokens=False).ids, EOS]
MIXES = list(product((True, False), repeat=3))
"""Text, token ids, log probabilities."""


def ask(text, token_ids, logprobs, *, n=1, seed=1, max_tokens=None, stop=(), **output):
    return GenerateRequest(
        text="hello",
        options=GenerationOptions(
            n=n,
            max_tokens=max_tokens,
            stop=stop,
            sampling=SamplingParams(num_logprobs=1 if logprobs else None, seed=seed),
            output=OutputOptions(text=text, token_ids=token_ids, **output),
        ),
    )


def answers_to(requests, worker, **settings):
    async def scenario(system):
        answers = [await system.ask(request) for request in requests]
        await system.quiet()
        return answers

    return run_system(scenario, worker, **settings)


def whole(delta):
    return delta.text, list(delta.token_ids), [p.logprobs[0].token_id for p in delta.logprobs]


def wanted(text, token_ids, logprobs):
    return TEXT if text else "", IDS if token_ids else [], IDS if logprobs else []


def test_deltas_add_up_to_what_was_asked_for_and_nothing_else():
    answers = answers_to([ask(*mix) for mix in MIXES], FakeWorker(says(TEXT)))
    for mix, answer in zip(MIXES, answers, strict=True):
        got = (answer.text, answer.tokens[0], [p.logprobs[0].token_id for p in answer.logprobs[0]])
        assert got == wanted(*mix)
        assert answer.usage.num_completion_tokens == len(IDS)
        assert answer.finishes[0].reason == FinishReason.FINISH_REASON_EOS


def test_the_last_cumulative_message_has_everything():
    answers = answers_to([ask(*mix, cumulative=True) for mix in MIXES], FakeWorker(says(TEXT)))
    for mix, answer in zip(MIXES, answers, strict=True):
        assert whole(answer.messages[-1].completions[0]) == wanted(*mix)


@pytest.mark.parametrize("cumulative", [False, True])
def test_the_only_message_has_everything(cumulative):
    requests = [ask(*mix, final_only=True, cumulative=cumulative) for mix in MIXES]
    for mix, answer in zip(MIXES, answers_to(requests, FakeWorker(says(TEXT))), strict=True):
        (message,) = answer.messages
        assert whole(message.completions[0]) == wanted(*mix)


def test_with_nothing_asked_for_the_end_comes_all_the_same():
    (answer,) = answers_to([ask(False, False, False)], FakeWorker(says(TEXT)))
    assert len(answer.messages) == 1
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_EOS


def test_final_only_of_several_completions_waits_for_the_last():
    def script(sequence):
        return counts(3 if sequence.index == 0 else 30)(sequence)

    (answer,) = answers_to([ask(True, True, True, n=2, final_only=True)], FakeWorker(script, step_seconds=0.005))
    (message,) = answer.messages
    assert sorted((d.index, len(d.token_ids), len(d.logprobs)) for d in message.completions) == [(0, 3, 3), (1, 30, 30)]


def test_final_only_has_heartbeats_while_it_waits():
    request = ask(True, True, False, final_only=True)
    request.options.output.heartbeat.FromMilliseconds(20)
    (answer,) = answers_to([request], FakeWorker(counts(20), step_seconds=0.02))
    assert sum(not m.completions for m in answer.messages) >= 5
    assert len(answer.messages[-1].completions[0].token_ids) == 20


def test_a_heartbeat_repeats_nothing_of_a_cumulative_stream():
    request = ask(True, True, False, cumulative=True)
    request.options.output.heartbeat.FromMilliseconds(20)
    (answer,) = answers_to([request], FakeWorker(counts(3), step_seconds=0.15))
    assert sum(bool(m.completions) for m in answer.messages) == 3


def test_a_stream_without_text_still_ends_at_a_stop_string():
    (answer,) = answers_to([ask(False, True, True, stop=["s 😀"])], FakeWorker(says(TEXT)))
    ids = toys.byte_level().encode(" Paris 😀", add_special_tokens=False).ids
    assert (answer.tokens[0], answer.finishes[0].stop) == (ids, "s 😀")
    assert answer.usage.num_completion_tokens == len(ids) == len(answer.logprobs[0])


def test_usage_is_in_the_last_message_only():
    (answer,) = answers_to([ask(True, True, False, n=3)], FakeWorker(counts(5)))
    usage = answer.usage
    assert [m.HasField("usage") for m in answer.messages] == [False] * (len(answer.messages) - 1) + [True]
    assert (usage.num_completion_tokens, usage.num_cached_tokens, usage.num_reasoning_tokens) == (15, 4, 0)
