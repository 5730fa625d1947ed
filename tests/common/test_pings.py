"""A client that waits for a silent stream asks now and then whether the server is there still, and must not be put off
for that. Case 65."""

import asyncio

import grpc

from common.server import ServiceServer
from fissile.v1 import GenerationServiceServicer, add_GenerationServiceServicer_to_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Of HTTP/2, on the connection itself."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload


async def pings_until_goodbye(port: int) -> tuple[int, bytes]:
    """Of ten pings, how many are answered, and what the server says if it has enough."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS))
    num_answered = 0
    try:
        while num_answered < 10:
            writer.write(frame(PING, num_answered.to_bytes(8, "big")))
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == GOAWAY:
                    return num_answered, payload[8:]
                if (head[3], head[4]) == (PING, ACK):
                    break
            num_answered += 1
    finally:
        writer.close()
    return num_answered, b""


def test_a_client_that_asks_often_is_not_put_off():
    async def scenario():
        service = ServiceServer("fissile.v1.GenerationService")
        service.serve(add_GenerationServiceServicer_to_server, GenerationServiceServicer())
        port = await service.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(60):
                return await pings_until_goodbye(port)
        finally:
            await service.stop(0)

    assert asyncio.run(scenario()) == (10, b"")


def test_without_our_options_it_would_be():
    """Else the test above would hold whatever they are: a misspelt one is ignored in silence."""

    async def scenario():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(60):
                return await pings_until_goodbye(port)
        finally:
            await server.stop(0)

    num_answered, reason = asyncio.run(scenario())
    assert num_answered < 10 and reason == b"too_many_pings"
