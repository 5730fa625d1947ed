"""More calls at a time than a router lets one connection have."""

import asyncio
from collections.abc import Iterator

import pytest

from fissile import AsyncClient, Client, connections
from fissile.channel import channel
from fissile.connections import Connections
from fissile.errors import InvalidArgumentError
from tests.fissile.fake_service import FakeService, serve

MAX_CALLS = 2


@pytest.fixture
def strict(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that lets a connection have so many calls open."""
    monkeypatch.setattr(connections, "MAX_CALLS", MAX_CALLS)
    with serve(service, options=[("grpc.max_concurrent_streams", MAX_CALLS)]) as address:
        yield address
        service.cancelled.set()


def test_none_waits_until_others_end(strict):
    with Client(strict) as client:
        streams = [client.generate("slow") for _ in range(2 * MAX_CALLS + 1)]
        assert [next(stream).text for stream in streams] == ["slow "] * len(streams)
        for stream in streams:
            stream.close()


def test_none_waits_on_an_event_loop_either(strict):
    async def texts() -> list[str]:
        async with AsyncClient(strict) as client:
            streams = [client.generate("slow") for _ in range(2 * MAX_CALLS + 1)]
            return [(await anext(stream)).text for stream in streams]

    assert asyncio.run(texts()) == ["slow "] * (2 * MAX_CALLS + 1)


def test_room_is_used_again_once_calls_have_ended(strict, service):
    with Client(strict) as client:
        for _ in range(MAX_CALLS + 1):
            client.generate("to the end").result()
            client.models()
            for end in (lambda stream: stream.close(), lambda stream: None):  # the second one is dropped
                service.cancelled.clear()
                stream = client.generate("slow")
                next(stream)
                end(stream)
                del stream
                assert service.cancelled.wait(5)
            with pytest.raises(InvalidArgumentError):
                client.generate("fail").result()
    assert len(client._routers.close()) == 1


def test_places_are_given_back_once():
    made = []

    def make():
        made.append(channel("localhost:1"))
        return made[-1]

    opened = Connections(make)
    full = [opened.place() for _ in range(connections.MAX_CALLS)]
    full[0].free()
    full[0].free()
    full[0] = opened.place()
    assert len(made) == 1
    beyond = opened.place()
    assert len(made) == 2
    del full
    assert beyond.stub is not opened.place().stub
    assert opened.close() == made
    for each in made:
        each.close()
