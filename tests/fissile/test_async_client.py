"""The asyncio client: the same answers as the blocking one."""

import asyncio

import pytest

from fissile import AsyncClient
from fissile.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from fissile.results import Delta
from tests.fissile.fake_service import Silent, Unavailable, serve


def run(address, use):
    """Run `use(client)` in an event loop of its own."""

    async def main():
        async with AsyncClient(address) as client:
            return await use(client)

    return asyncio.run(main())


def test_deltas_and_result(address):
    async def use(client):
        stream = client.generate("one two")
        return [delta async for delta in stream], await stream.result()

    deltas, generation = run(address, use)
    assert deltas[0] == Delta(0, "one", token_ids=(0,))
    assert generation.text == "one two"


def test_tools_prompts_and_cumulative_streams(address):
    async def use(client):
        called = await client.chat([{"role": "user", "content": "?"}], tools=[{"name": "f"}]).result()
        several = await client.generate(["a b", "c"]).result()
        whole = await client.generate("one two", cumulative=True).result()
        return called.completions[0].tool_calls, [c.text for c in several.completions], whole.text

    calls, texts, whole = run(address, use)
    assert [(call.id, call.arguments) for call in calls] == [("call_0", '{"x": 1}'), ("call_1", "{}")]
    assert (texts, whole) == (["a b", "c"], "one two")


def test_streams_side_by_side(address):
    async def use(client):
        return await asyncio.gather(*(client.generate(f"number {i}").result() for i in range(8)))

    assert [generation.text for generation in run(address, use)] == [f"number {i}" for i in range(8)]


def test_chat_models_stats_tokenize(address):
    async def use(client):
        answer = await client.chat([{"role": "user", "content": "u"}]).result()
        tokens = await client.tokenize("ab")
        text = await client.detokenize([token.id for token in tokens])
        return answer.text, text, (await client.models())[0].id, (await client.stats()).num_open_requests

    assert run(address, use) == ("1messages", "ab", "fake", 1)


@pytest.mark.parametrize(("prompt", "error"), [("fail", InvalidArgumentError), ("cut", InternalError)])
def test_errors_are_typed(address, prompt, error):
    with pytest.raises(error):
        run(address, lambda client: client.generate(prompt).result())


def test_timeout(address):
    with pytest.raises(DeadlineExceededError, match=r"^the deadline passed before the request was finished$"):
        run(address, lambda client: client.generate("slow", timeout=0.1).result())


@pytest.mark.parametrize("is_client", [True, False])
def test_what_was_closed_says_so_and_looks_like_no_cancellation_of_the_task(address, is_client):
    async def use(client):
        stream = client.generate("slow")
        await anext(stream)
        await client.close() if is_client else stream.close()
        with pytest.raises(CancelledError, match=r"^the stream or its client was closed$"):
            await anext(stream)
        if is_client:
            with pytest.raises(FailedPreconditionError, match=r"^the client is closed$"):
                await client.models()

    run(address, use)


def test_a_task_that_is_cancelled_is(address, service):
    async def use(client):
        task = asyncio.create_task(client.generate("slow").result())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(address, use)
    assert service.cancelled.wait(5)


def test_leaving_the_stream_cancels_the_call(address, service):
    async def use(client):
        async with client.generate("slow") as stream:
            await anext(stream)

    run(address, use)
    assert service.cancelled.wait(5)


def test_cancelling_the_task_cancels_the_call(address, service):
    async def use(client):
        task = asyncio.create_task(client.generate("slow").result())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(address, use)
    assert service.cancelled.wait(5)


def test_a_call_goes_on_to_the_next_router(address, service, monkeypatch):
    monkeypatch.setattr("fissile.async_client.ANSWER_SECONDS", 0.1)

    async def use(client):
        texts = [(await client.generate("one two").result()).text for _ in range(2)]
        return texts, [model.id for model in await client.models()]

    with serve(Silent()) as silent, serve(Unavailable()) as draining:
        assert run(["localhost:1", silent, draining, address], use) == (["one two"] * 2, ["fake"])
    assert len(service.requests) == 2


def test_an_answer_that_has_begun_is_not_begun_again(address, service):
    async def use(client):
        stream = client.generate("one two")
        first = await anext(stream)
        with pytest.raises(UnavailableError, match="draining"):
            await stream.result()
        return first.text

    with serve(Unavailable(after_first=True)) as draining:
        assert run([draining, address], use) == "one"
    assert service.requests == []
