"""Log probabilities end to end: one entry for each new token, with the bytes of the tokens, in every kind of stream."""

import asyncio

import pytest

from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    RequestOutput,
    SamplingParams,
)
from router.answering.logprobs import with_text
from tests.fakes import tokenizer as toys
from tests.fakes.asked import EOS, logprobs_of
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says
from tests.router.answering.logprobs import answer_to, ask, chosen


def bytes_of(token_ids):
    tokenizer = toys.byte_level()
    return b"".join(tokenizer.decode([i], skip_special_tokens=False).encode() for i in token_ids)


def test_the_chosen_token_comes_first_then_the_likely_ones_all_with_their_bytes():
    answer = answer_to(ask(num=2), FakeWorker(says("A")))
    first, last = answer.logprobs[0]
    assert [(e.token_id, e.logprob, e.rank) for e in first.logprobs] == [
        (toys.byte_level().token_to_id("A"), -2.5, 3),
        (100, -0.5, 1),
        (101, -1.5, 2),
    ]
    assert first.logprobs[0].text == b"A"
    assert last.logprobs[0].text == b"<|im_end|>"
    assert all(e.text for e in first.logprobs)


def test_a_token_that_is_part_of_a_character_has_bytes():
    answer = answer_to(ask(num=0), FakeWorker(says("😀", eos=False)))
    assert b"".join(p.logprobs[0].text for p in answer.logprobs[0]) == "😀".encode()


def test_without_token_ids_there_is_still_one_for_each_token():
    """Text of a character comes with its last token; the logprobs of the others are not lost."""
    answer = answer_to(ask(), FakeWorker(says("a😀b")))
    assert not any(d.token_ids for m in answer.messages for d in m.completions)
    assert len(answer.logprobs[0]) == answer.usage.num_completion_tokens
    assert answer.text == "a😀b"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_deltas_carry_logprobs_for_exactly_their_tokens(tokens_per_step):
    worker = FakeWorker(counts(20), tokens_per_step=tokens_per_step)
    answer = answer_to(ask(output=OutputOptions(token_ids=True)), worker)
    for message in answer.messages:
        for delta in message.completions:
            assert chosen(delta.logprobs) == list(delta.token_ids)
    assert chosen(answer.logprobs[0]) == counts(20)(worker.received[0])


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_a_stop_string_ends_ids_logprobs_text_and_usage_together(tokens_per_step):
    """Case 50."""
    worker = FakeWorker(says("ABCDEFGHIJ", eos=False), tokens_per_step=tokens_per_step)
    answer = answer_to(ask(stop=["DE"], output=OutputOptions(token_ids=True)), worker)
    assert (answer.text, answer.finishes[0].reason) == ("ABC", FinishReason.FINISH_REASON_STOP_STRING)
    assert bytes_of(answer.tokens[0]) == b"ABCDE"
    assert chosen(answer.logprobs[0]) == answer.tokens[0]
    assert answer.usage.num_completion_tokens == 5


def test_text_held_back_for_a_stop_string_keeps_its_logprobs_with_its_ids():
    answer = answer_to(
        ask(stop=["BCDE"], output=OutputOptions(token_ids=True)), FakeWorker(says("ABCX"), step_seconds=0.01)
    )
    for message in answer.messages:
        for delta in message.completions:
            assert chosen(delta.logprobs) == list(delta.token_ids)
    assert (answer.text, len(answer.logprobs[0])) == ("ABCX", 5)


def test_cumulative_messages_carry_all_logprobs_so_far():
    worker = FakeWorker(counts(6), step_seconds=0.01)
    answer = answer_to(ask(output=OutputOptions(cumulative=True, token_ids=True)), worker)
    deltas = [m.completions[0] for m in answer.messages]
    assert all(chosen(d.logprobs) == list(d.token_ids) for d in deltas)
    assert chosen(deltas[-1].logprobs) == counts(6)(worker.received[0])


def test_final_only_has_all_logprobs_in_its_one_message():
    worker = FakeWorker(counts(6))
    answer = answer_to(ask(num_prompt=0, output=OutputOptions(final_only=True)), worker)
    assert len(answer.messages) == 1
    assert chosen(answer.logprobs[0]) == counts(6)(worker.received[0])
    assert chosen(answer.messages[0].prompt_logprobs) == list(worker.received[0].token_ids)[1:]


def test_messages_that_merge_keep_all_logprobs_in_order():
    worker = FakeWorker(counts(300), step_seconds=0)
    answer = answer_to(ask(), worker, max_message_rate=20.0)
    assert len(answer.messages) < 100
    assert chosen(answer.logprobs[0]) == counts(300)(worker.received[0])


def test_each_of_n_completions_has_its_own():
    worker = FakeWorker(counts(5))
    answer = answer_to(ask(n=3), worker)
    assert {i: chosen(p) for i, p in answer.logprobs.items()} == {s.index: counts(5)(s) for s in worker.received}


def test_chat_has_logprobs_too():
    sampling = SamplingParams(num_logprobs=0)
    request = ChatRequest(messages=[ChatMessage(role=2, content="a")], options=GenerationOptions(sampling=sampling))
    assert chosen(answer_to(request, FakeWorker(says("A"))).logprobs[0])[-1] == EOS


def test_prompt_logprobs_come_once_in_the_first_message():
    worker = FakeWorker(counts(5), step_seconds=0.01)
    answer = answer_to(ask(num=None, num_prompt=2), worker)
    prompt = list(worker.received[0].token_ids)
    assert chosen(answer.messages[0].prompt_logprobs) == prompt[1:]
    assert answer.messages[0].prompt_logprobs[0].logprobs[0].text == bytes_of(prompt[1:2])
    assert not any(m.prompt_logprobs for m in answer.messages[1:])
    assert not answer.logprobs[0]


def test_a_prompt_of_one_token_has_no_prompt_logprobs():
    request = ask(num_prompt=1)
    request.tokens.token_ids.append(5)
    answer = answer_to(request, FakeWorker(counts(2)))
    assert not answer.messages[0].prompt_logprobs
    assert len(answer.logprobs[0]) == 2


def test_those_of_the_prompt_come_once_for_n_completions():
    worker = FakeWorker(counts(5))
    answer = answer_to(ask(num_prompt=1, n=3), worker)
    prompt = list(worker.groups[0].prompt_token_ids)
    assert chosen(p for message in answer.messages for p in message.prompt_logprobs) == prompt[1:]


def long_prompt(**options):
    """99,968 entries: more than twelve messages of 8,192."""
    tokens = [5 + i % 300 for i in range(1563)]
    request = ask(num=None, num_prompt=63, output=OutputOptions(prompt_token_ids=True, **options), max_tokens=3)
    request.tokens.token_ids.extend(tokens)
    return request, tokens


@pytest.mark.parametrize("final_only", [False, True])
def test_those_of_a_long_prompt_come_in_parts_before_the_tokens(final_only):
    """C8: one message with all of them would be larger than any may be."""
    request, tokens = long_prompt(final_only=final_only)
    answer = answer_to(request, FakeWorker(counts(3), max_model_len=2000))
    sizes = [len(message.prompt_logprobs) for message in answer.messages]
    assert chosen(p for message in answer.messages for p in message.prompt_logprobs) == tokens[1:]
    assert len(sizes) > 12 and max(sizes) * 64 <= 8192
    num_parts = sum(size > 0 for size in sizes)
    assert not any(message.completions for message in answer.messages[: num_parts - 1])
    assert [list(message.prompt_token_ids) for message in answer.messages[:2]] == [tokens, []]
    assert answer.usage.num_completion_tokens == 3


def test_those_of_a_long_prompt_go_on_at_another_worker():
    """Each comes once, though the second worker begins again."""
    request, tokens = long_prompt()
    a, b = (FakeWorker(counts(3), max_model_len=2000, prompt_chunk=128, step_seconds=0.02) for _ in range(2))

    async def scenario(system):
        call = system.stub.Generate(request, timeout=20)
        head = [await call.read() for _ in range(3)]
        await (a if a.groups else b).kill()
        return head, await collect(call)

    head, answer = run_system(scenario, a, b)
    assert len(a.groups) == len(b.groups) == 1
    assert chosen(p for message in [*head, *answer.messages] for p in message.prompt_logprobs) == tokens[1:]


def test_a_deadline_before_the_prompts_end_leaves_the_rest_out():
    class Late(FakeWorker):
        def _outputs(self, sequence):
            ended = RequestOutput(index=0, finish_reason=FinishReason.FINISH_REASON_DEADLINE)
            return [next(self._prompt_outputs(sequence)), ended]

    request, _ = long_prompt()
    answer = answer_to(request, Late(counts(3), max_model_len=2000, prompt_chunk=128))
    assert sum(len(message.prompt_logprobs) for message in answer.messages) == 128
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_DEADLINE


def test_a_resumed_completion_has_each_logprob_once_and_asks_for_the_prompt_no_more():
    a, b = (FakeWorker(counts(40), step_seconds=0.01) for _ in range(2))

    async def scenario(system):
        task = asyncio.create_task(system.ask(ask(num_prompt=1, output=OutputOptions(token_ids=True))))
        await until(lambda: max(a.num_emitted, b.num_emitted) >= 5)
        first, second = (a, b) if a.received else (b, a)
        await first.kill()
        return await task, second

    answer, second = run_system(scenario, a, b)
    assert chosen(answer.logprobs[0]) == answer.tokens[0] == counts(40)(second.received[0])
    assert not second.received[0].sampling.HasField("num_prompt_logprobs")
    assert second.received[0].sampling.num_logprobs == 1
    assert sum(bool(m.prompt_logprobs) for m in answer.messages) == 1


def test_more_logprobs_than_the_vocabulary_are_the_vocabulary():
    """Case 38."""
    worker = FakeWorker(says("x"), vocab_size=20)
    answer_to(GenerateRequest(tokens={"token_ids": [5, 6]}, options=ask(num=21, num_prompt=64).options), worker)
    sampling = worker.received[0].sampling
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (20, 20)


class ForgetsLogprobs(FakeWorker):
    def _outputs(self, sequence):
        outputs = list(super()._outputs(sequence))
        del outputs[1].logprobs[:]
        return outputs


def test_a_worker_that_sends_too_few_is_an_error_and_nothing_stays_open():
    async def scenario(system):
        error = await error_of(system.ask(ask()))
        await system.quiet()
        return error

    assert run_system(scenario, ForgetsLogprobs(counts(5))).reason == "INTERNAL"


def test_columns_of_a_worker_become_entries_with_text():
    (given,) = logprobs_of([7], 1)
    (kept,) = with_text([given], lambda ids: [b"%d" % i for i in ids])
    assert [(e.token_id, e.logprob, e.rank, e.text) for e in kept.logprobs] == [
        (7, -2.5, 3, b"7"),
        (100, -0.5, 1, b"100"),
    ]
