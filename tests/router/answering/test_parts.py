"""Answers too long for one message come in several; joined they are the whole."""

import pytest

from fissile.errors import InvalidArgumentError
from fissile.v1 import Finish, FinishReason, OutputOptions, TokenLogprob, TokenLogprobs, Usage
from router.answering import parts as parts_module
from router.answering.completion import Delta
from router.answering.parts import parts
from router.answering.responses import generate_response
from router.answering.update import Update
from router.http.answers import join
from tests.fakes.system import error_of, run_system
from tests.fakes.worker import FakeWorker, counts
from tests.router.answering.logprobs import answer_to, ask, chosen

END = Finish(reason=FinishReason.FINISH_REASON_LENGTH)


def delta(index, num_tokens, num_likely=1, prompt_index=0):
    entries = [TokenLogprob(token_id=7)] * num_likely
    logprobs = [TokenLogprobs(logprobs=entries) for _ in range(num_tokens)]
    return Delta(index, "x" * num_tokens, "", [], list(range(num_tokens)), logprobs, END, prompt_index)


def update(*deltas):
    return Update(list(deltas), usage=Usage(num_completion_tokens=5), prompt_token_ids=[1, 2])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(parts_module, "MAX_PART_BYTES", 4000)


def test_what_fits_is_one_part():
    whole = update(delta(0, 10))
    assert list(parts(whole, cumulative=False)) == [whole]


@pytest.mark.parametrize("shape", [[(0, 500)], [(0, 30), (1, 30), (2, 30), (3, 30)], [(0, 5), (1, 400), (2, 5)]])
def test_parts_are_small_and_joined_they_are_the_whole(shape):
    whole = update(*(delta(*each) for each in shape))
    got = list(parts(whole, cumulative=False))
    assert len(got) > 1
    messages = [generate_response("r", part) for part in got]
    assert all(message.ByteSize() <= 8000 for message in messages)
    assert [part.usage is not None for part in got] == [False] * (len(got) - 1) + [True]
    assert [bool(part.prompt_token_ids) for part in got] == [True] + [False] * (len(got) - 1)
    first, *others = messages
    for message in others:
        join(first, message)
    assert first == generate_response("r", whole)


def test_a_cumulative_message_must_hold_everything():
    with pytest.raises(InvalidArgumentError, match=r"options\.output\.cumulative: what there is so far is too large"):
        list(parts(update(delta(0, 500)), cumulative=True))


def test_over_the_wire():
    request = ask(num=8, output=OutputOptions(final_only=True, token_ids=True), n=3)
    answer = answer_to(request, FakeWorker(counts(60)))
    assert len(answer.messages) > 10
    assert {i: chosen(answer.logprobs[i]) for i in range(3)} == answer.tokens


def test_a_cumulative_request_that_outgrows_a_message_ends_and_leaves_nothing():
    async def scenario(system):
        error = await error_of(system.ask(ask(num=8, output=OutputOptions(cumulative=True), max_tokens=100)))
        await system.quiet()
        return error

    assert run_system(scenario, FakeWorker(counts(100))).reason == "INVALID_ARGUMENT"
