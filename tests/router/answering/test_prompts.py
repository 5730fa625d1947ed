"""Several prompts in one call: one stream, one end, one place in every count for each prompt."""

import asyncio

import grpc
import pytest

from fissile.v1 import (
    BeamHypothesis,
    BeamSearch,
    ChatMessage,
    ChatRequest,
    ChatRole,
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    GetStatsRequest,
    OutputOptions,
    Prompt,
    RequestOutput,
    SamplingParams,
    TokenSequence,
)
from tests.fakes import tokenizer as toys
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says

LENGTH = FinishReason.FINISH_REASON_LENGTH


def ask(*lengths, output=None, seed=None, request_id="", **options):
    """Prompts of so many tokens."""
    return GenerateRequest(
        request_id=request_id,
        prompts=[Prompt(tokens=TokenSequence(token_ids=[5] * length)) for length in lengths],
        options=GenerationOptions(
            output=output or OutputOptions(token_ids=True), sampling=SamplingParams(seed=seed), **options
        ),
    )


def answer_to(request, *workers, **settings):
    async def scenario(system):
        answer = await system.ask(request)
        await system.quiet()
        return answer, await system.stub.GetStats(GetStatsRequest())

    return run_system(scenario, *workers, **settings)


def expected(worker, length):
    return {s.num_prompt_tokens: counts(length)(s) for s in worker.received}


def test_outputs_carry_the_index_of_their_prompt():
    worker = FakeWorker(counts(8))
    answer, _ = answer_to(ask(3, 4, 5), worker)
    tokens = expected(worker, 8)
    assert answer.tokens == {0: tokens[3], (1, 0): tokens[4], (2, 0): tokens[5]}
    assert {f.reason for f in answer.finishes.values()} == {LENGTH}


def test_texts_are_tokenised_as_one_prompt_is():
    worker = FakeWorker(counts(2))
    request = GenerateRequest(prompts=[Prompt(text="hello"), Prompt(text="hello world")])
    answer_to(request, worker)
    request.add_special_tokens = False
    answer_to(request, worker)
    ids = [toys.byte_level().encode(t, add_special_tokens=False).ids for t in ("hello", "hello world")]
    got = sorted(list(s.token_ids) for s in worker.received)
    assert got == sorted([*ids, *([0, *i] for i in ids)])


def test_usage_sums_and_comes_once_with_the_last_message():
    worker = FakeWorker(counts(8))
    answer, stats = answer_to(ask(3, 4, n=2), worker)
    usage = answer.usage
    assert (usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens) == (7, 32, 8)
    assert sum(m.HasField("usage") for m in answer.messages) == 1
    assert sum(m.HasField("timings") for m in answer.messages) == 1
    assert answer.timings.HasField("ttft") and answer.timings.HasField("e2e")
    assert (stats.num_prompt_tokens, stats.num_completion_tokens) == (7, 32)
    assert [(f.reason, f.count) for f in stats.finished] == [("length", 1)]


def test_the_call_ends_when_the_slowest_prompt_has_ended():
    worker = FakeWorker(lambda s: counts(2 if s.num_prompt_tokens == 3 else 40)(s), step_seconds=0.005)
    answer, _ = answer_to(ask(3, 4), worker)
    assert (len(answer.tokens[0]), len(answer.tokens[1, 0])) == (2, 40)


def test_each_prompt_draws_as_if_it_came_alone():
    worker = FakeWorker(counts(2))
    answer_to(ask(3, 4, seed=7, n=2), worker)
    assert sorted((s.num_prompt_tokens, s.index, s.sampling.seed) for s in worker.received) == [
        (3, 0, 7), (3, 1, 8), (4, 0, 7), (4, 1, 8),
    ]  # fmt: skip
    worker.forget()
    answer_to(ask(3, 3), worker)
    assert worker.received[0].sampling.seed != worker.received[1].sampling.seed


def test_final_only_is_one_message_with_everything():
    worker = FakeWorker(lambda s: counts(s.num_prompt_tokens)(s))
    answer, _ = answer_to(ask(3, 9, 5, output=OutputOptions(token_ids=True, final_only=True)), worker)
    assert len(answer.messages) == 1
    assert {key: len(ids) for key, ids in answer.tokens.items()} == {0: 3, (1, 0): 9, (2, 0): 5}


def test_heartbeats_fill_the_silence_of_the_whole_call_only():
    output = OutputOptions()
    output.heartbeat.FromMilliseconds(40)
    silent, _ = answer_to(ask(3, 4, output=output), FakeWorker(counts(1), step_seconds=0.3))
    assert sum(not m.completions for m in silent.messages) >= 3
    output.token_ids = True
    output.heartbeat.FromMilliseconds(1000)
    busy, _ = answer_to(ask(3, 4, output=output), FakeWorker(counts(50), step_seconds=0.005))
    assert not any(not m.completions for m in busy.messages)


def test_beam_search_takes_several_prompts():
    best = RequestOutput(
        finish_reason=LENGTH,
        hypotheses=[BeamHypothesis(token_ids=[5, 6], score=-1, finish_reason=LENGTH)] * 2,
    )
    request = ask(3, 4)
    request.options.sampling.beam_search.CopyFrom(BeamSearch(width=2))
    answer, _ = answer_to(request, FakeWorker(counts(1), refuse=best, capabilities=["beam_search"]))
    assert answer.tokens == {0: [5, 6], (1, 0): [5, 6]}
    assert answer.finishes[1, 0].score == -1


def test_prompts_spread_over_workers_and_each_moves_alone():
    a, b = (FakeWorker(counts(40), step_seconds=0.01) for _ in range(2))

    async def scenario(system):
        task = asyncio.create_task(system.ask(ask(3, 4, 5, 6, seed=1)))
        await until(lambda: min(a.num_emitted, b.num_emitted) >= 10)
        await a.kill()
        answer = await task
        await system.quiet()
        return answer

    answer = run_system(scenario, a, b)
    tokens = expected(b, 40)
    assert answer.tokens == {0: tokens[3], (1, 0): tokens[4], (2, 0): tokens[5], (3, 0): tokens[6]}


def test_cancel_reaches_all():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        call = system.stub.Generate(ask(3, 4, 5))
        await call.read()
        await until(lambda: len(worker.received) == 3)
        call.cancel()
        await system.quiet()
        return dict(system.router.parts.metrics.finished)

    assert run_system(scenario, worker) == {"cancelled": 1}
    assert sorted(worker.aborted) == sorted(s.id for s in worker.received)


def test_the_deadline_reaches_all():
    worker = FakeWorker(counts(1000), step_seconds=0.02)

    async def scenario(system):
        error = await error_of(system.ask(ask(3, 4), timeout=0.3))
        await system.quiet()
        return error

    assert run_system(scenario, worker).code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert sorted(worker.aborted) == sorted(s.id for s in worker.received)


class RefusesLongPrompts(FakeWorker):
    def _outputs(self, sequence):
        if sequence.num_prompt_tokens > 4:
            return [
                RequestOutput(
                    finish_reason=FinishReason.FINISH_REASON_ERROR, error_code=3, field="prompt_token_ids", detail="no"
                )
            ]
        return super()._outputs(sequence)


def test_a_prompt_that_fails_ends_the_call_and_is_named():
    worker = RefusesLongPrompts(counts(1000), step_seconds=0.01)

    async def scenario(system):
        error = await error_of(system.ask(ask(3, 4, 5)))
        await system.quiet()
        return error

    error = run_system(scenario, worker)
    assert [v.field for v in error.violations] == ["prompts[2].tokens.token_ids"]
    assert len(worker.aborted) == 2


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([Prompt(text="a"), Prompt(text="b " * 200)], "prompts[1].text"),
        ([Prompt(tokens=TokenSequence(token_ids=[5] * 64)), Prompt(text="a")], "prompts[0].tokens.token_ids"),
    ],
)
def test_one_too_long_is_named_and_no_worker_sees_the_others(prompts, field):
    worker = FakeWorker(counts(2), max_model_len=64)

    async def scenario(system):
        error = await error_of(system.ask(GenerateRequest(prompts=prompts)))
        await system.quiet()
        return error

    assert [v.field for v in run_system(scenario, worker).violations] == [field]
    assert not worker.received


def test_places_are_taken_for_all_or_none():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        first = system.stub.Generate(ask(3, 4))
        await first.read()
        num_open = len(system.router.parts.open_requests)
        refused = await error_of(system.ask(ask(3, 4)))
        second = system.stub.Generate(ask(3))
        await second.read()
        first.cancel()
        second.cancel()
        await system.quiet()
        return num_open, refused

    num_open, refused = run_system(scenario, worker, max_open_requests=3)
    assert num_open == 2
    assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (
        refused.message
        == "open requests: 2 of 3 are taken, 2 of them by this client, and 2 more are wanted (max-open-requests)"
    )


def test_a_slow_reader_costs_few_messages():
    """What is not read merges inside each prompt's own request."""
    worker = FakeWorker(counts(300), step_seconds=0)
    answer, _ = answer_to(ask(3, 4), worker, max_message_rate=50.0)
    assert {key: len(ids) for key, ids in answer.tokens.items()} == {0: 300, (1, 0): 300}
    assert len(answer.messages) < 100


def test_one_listed_prompt_is_like_a_single_one():
    worker = FakeWorker(counts(3))
    answer, _ = answer_to(ask(4, output=OutputOptions(prompt_token_ids=True)), worker)
    assert list(answer.messages[0].prompt_token_ids) == [5] * 4


def test_a_shutdown_ends_all_with_unavailable():
    worker = FakeWorker(counts(1000), step_seconds=0.01)

    async def scenario(system):
        task = asyncio.create_task(error_of(system.ask(ask(3, 4))))
        await until(lambda: len(worker.received) == 2)
        await system.router.parts.open_requests.close(0.05)
        return await task

    assert run_system(scenario, worker).code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(text="a hello"),
        GenerateRequest(prompts=[Prompt(text="a"), Prompt(text=" hello")]),
        ChatRequest(messages=[ChatMessage(role=ChatRole.CHAT_ROLE_USER, content="a hello")]),
    ],
)
def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_no_fault_of_the_text(request_):
    beyond = toys.byte_level().token_to_id("Ġhello")

    async def scenario(system):
        call = system.stub.Chat if isinstance(request_, ChatRequest) else system.stub.Generate
        error = await error_of(collect(call(request_)))
        await system.quiet()
        return error

    error = run_system(scenario, FakeWorker(says("x"), vocab_size=beyond))
    assert error.code == grpc.StatusCode.FAILED_PRECONDITION
    assert [violation.field for violation in error.violations] == ["model"]
    assert f"the token ' hello' ({beyond})" in error.message and f"vocabulary has {beyond}" in error.message
