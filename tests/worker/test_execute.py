"""Sequences up, tokens down, each sequence with its own tokens."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from common.field_count import MAX_FIELDS
from fissile.v1 import ExecuteCommand, ExecuteRequest, FinishReason, Sequence, SequenceGroup, TokenSequence
from tests.worker.fake_executor import EOS
from tests.worker.harness import connect, expected, group, quiet, run_all, run_worker, sequence, until

LENGTH = FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_sequence_streams_its_tokens_in_order(async_scheduling):
    message = sequence(1, max_tokens=4)

    async def scenario(system):
        router = await run_all(system, message)
        await quiet(system)
        return router

    router = run_worker(scenario, async_scheduling=async_scheduling)
    outputs = router.outputs_of(1)
    lengths = [len(output.token_ids) for output in outputs]
    assert router.tokens[1] == expected(message, 4)
    assert [output.token_offset for output in outputs] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert [output.finish_reason for output in outputs] == [0] * (len(outputs) - 1) + [LENGTH]
    steps = [response.step for response in router.messages]
    assert steps == sorted(set(steps))


def test_sequences_of_one_step_come_in_one_message():
    """Those that were there when it was scheduled: they come while another one's step is held."""
    messages = [sequence(id) for id in (2, 3, 4)]

    async def scenario(system):
        router = connect(system)
        system.executor.open.clear()
        await router.send(sequence(1, max_tokens=1))
        await until(lambda: system.executor.num_submitted)
        await router.send(*messages)
        await until(lambda: system.server._broker.num_open == 4)
        system.executor.step_seconds = 0.05  # so that messages of several steps are not joined
        system.executor.open.set()
        await router.finish(2, 3, 4)
        return router

    router = run_worker(scenario)
    _, *shared = router.messages
    assert {len(response.outputs) for response in shared} == {3}
    assert {id: router.tokens[id] for id in (2, 3, 4)} == {m.sequences[0].id: expected(m, 4) for m in messages}
    assert shared[0].load.num_running == 3
    assert {response.last_sequence_id for response in shared} == {4}


def test_streams_do_not_share_ids():
    messages = [sequence(7), sequence(7)]

    async def scenario(system):
        return await asyncio.gather(*(run_all(system, message) for message in messages))

    routers = run_worker(scenario)
    assert [router.tokens[7] for router in routers] == [expected(message, 4) for message in messages]


def test_a_resumed_sequence_goes_on_where_it_was():
    whole = sequence(1, max_tokens=6)
    tokens = expected(whole, 6)
    resumed = sequence(1, list(whole.prompt_token_ids), 6, tokens[:2])

    async def scenario(system):
        return await run_all(system, resumed)

    router = run_worker(scenario)
    assert router.tokens[1] == tokens[2:]
    assert router.outputs_of(1)[0].token_offset == 2


def test_half_close_ends_the_stream_after_its_sequences():
    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1), sequence(2, max_tokens=8))
        await router.call.done_writing()
        code, _ = await router.end()
        return set(router.ended), code

    assert run_worker(scenario) == ({1, 2}, "OK")


@pytest.mark.parametrize("kind", ["eos", "stop_token", "stop_sequence"])
def test_stops_are_named(kind):
    message = sequence(1, list(range(30, 40)), max_tokens=40)
    tokens = expected(message, 40)
    end = next(i for i, token in enumerate(tokens) if token == EOS and i > 1)
    if kind == "eos":
        message.ignore_eos = False
        end = tokens.index(EOS)
    elif kind == "stop_token":
        message.stop_token_ids.append(EOS)
        end = tokens.index(EOS)
    else:
        message.stop_token_sequences.append(TokenSequence(token_ids=tokens[end - 1 : end + 1]))
        pairs = list(pairwise(tokens))
        end = pairs.index((tokens[end - 1], tokens[end])) + 1

    async def scenario(system):
        return await run_all(system, message)

    router = run_worker(scenario)
    assert router.tokens[1] == tokens[: end + 1]
    last = router.ended[1]
    assert FinishReason.Name(last.finish_reason) == f"FINISH_REASON_{kind.upper()}"
    assert last.HasField("stop_token_id") == (kind != "stop_sequence")
    assert kind == "stop_sequence" or last.stop_token_id == EOS


def test_sequences_without_a_seed_differ():
    prompt = list(range(20, 30))

    async def scenario(system):
        return await run_all(system, group([Sequence(id=1 + i, index=i) for i in range(3)], prompt, 16))

    router = run_worker(scenario)
    assert len({tuple(router.tokens[id]) for id in (1, 2, 3)}) == 3


def test_the_end_says_how_long_it_took_and_what_was_cached():
    prompt = list(range(20, 60))

    async def scenario(system):
        await run_all(system, sequence(1, prompt))
        return await run_all(system, sequence(1, prompt))

    last = run_worker(scenario).ended[1]
    assert last.num_cached_tokens == 32
    assert last.timings.HasField("queued") and last.timings.HasField("prefill") and last.timings.HasField("decode")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_first_tokens_say_so_too_as_the_end_may_never_be_heard(async_scheduling):
    """Case sglang#25228: a router that finds a stop string ends the sequence itself."""
    prompt = list(range(20, 60))

    async def scenario(system):
        await run_all(system, sequence(1, prompt))
        system.executor.step_seconds = 0.01
        router = connect(system)
        await router.send(group([Sequence(id=2 + i, index=i) for i in range(2)], prompt, 100))
        await router.read_tokens(2, 3)
        await router.read_tokens(3, 3)
        await router.send(2, 3)
        await router.finish(2, 3)
        return [router.outputs_of(id) for id in (2, 3)]

    for outputs, num_cached in zip(run_worker(scenario, async_scheduling=async_scheduling), (32, 39), strict=True):
        first, *others, last = outputs
        assert first.num_cached_tokens == last.num_cached_tokens == num_cached
        assert first.timings.HasField("queued") and first.timings.HasField("prefill")
        assert not any(output.HasField("timings") or output.num_cached_tokens for output in others)


def test_a_changed_load_is_told_to_a_stream_without_outputs():
    async def scenario(system):
        watcher = connect(system)
        await watcher.send(999)
        system.executor.open.clear()
        worker = connect(system)
        await worker.send(sequence(1, max_tokens=8))
        system.executor.open.set()
        await worker.finish(1)
        assert await watcher.read()
        return watcher.messages[0]

    response = run_worker(scenario)
    assert not response.outputs and response.load.num_blocks == 64 and response.load.num_generated_tokens > 0


NEITHER = "neither a group of sequences nor an abort is set"
TOO_MANY = "sequences in a group; at most 1024 is needed"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (ExecuteCommand(), NEITHER),
        (ExecuteCommand(group=SequenceGroup(prompt_token_ids=[5])), NEITHER),
        (ExecuteCommand(group=group(1025)), f"is 1025 {TOO_MANY}"),
        (ExecuteCommand(group=group([Sequence(id=1)] * 60_000)), f"is 60000 {TOO_MANY}"),
        (
            ExecuteCommand(group=group([Sequence(id=1)] * 300_000)),
            f"with it the request has more than {MAX_FIELDS} fields and entries",
        ),
    ],
    ids=["nothing", "no sequence", "more than a message has endings", "many more", "more than are counted"],
)
def test_a_command_that_has_no_ending_ends_the_stream(command, said):
    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1, max_tokens=40))
        await router.call.write(ExecuteRequest(commands=[command]))
        end = await router.end()
        await quiet(system)
        return end

    assert run_worker(scenario) == ("INVALID_ARGUMENT", f"commands: {said}")


def test_a_message_of_very_many_commands_leaves_time_to_others():
    """3,000 refusals in a row took the event loop for a fifth of a second."""
    bad = [group([Sequence(id=id)], prompt=[]) for id in range(1, 3001)]
    turns = 0

    async def scenario(system):
        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        router = connect(system)
        await router.send(sequence(9000))
        await router.finish(9000)
        handled = system.server._broker.handle
        seen = []

        def handle(stream, command):
            seen.append(turns)
            handled(stream, command)

        system.server._broker.handle = handle
        counting = asyncio.create_task(count())
        await router.send(*bad)
        await router.finish(*range(1, 3001))
        counting.cancel()
        return seen

    seen = run_worker(scenario)
    assert len(seen) == 3000 and max(Counter(seen).values()) <= 64


def test_tokens_between_the_first_and_the_last_share_a_message_where_steps_come_fast(monkeypatch):
    monkeypatch.setattr("worker.engine.reports.MAX_PAUSE_SECONDS_ON_CPU", 3600.0)
    message = sequence(1, max_tokens=30)

    async def scenario(system):
        system.executor.step_seconds = 0.01
        return await run_all(system, message)

    router = run_worker(scenario, max_output_rate=1e-9)
    assert router.tokens[1] == expected(message, 30)
    assert 1 <= len(router.messages) <= 2
    assert router.messages[-1].step == router.messages[0].step + 30 - len(router.messages[0].outputs[0].token_ids)
