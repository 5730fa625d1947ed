"""One hostile client of a router, in a process of its own, for `bench/hostile.py`.

    python -m bench.attacks KIND --router ADDRESS --http ADDRESS --key KEY

It goes on until it is killed. What it is answered does not matter to it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from fissile.channel import aio_channel, call_metadata
from fissile.v1 import GenerateRequest, GenerationOptions, GenerationServiceStub
from tests.fakes.deep import delimited

MIB = 1024 * 1024
LONGEST = 4 * MIB
"""Bytes of the longest prompt that a router takes."""
WORDS = "What does it cost to count all of these words, one after the other? "


@dataclass(frozen=True, slots=True)
class Target:
    router: str
    http: str
    key: str

    async def read(self, request: GenerateRequest | bytes) -> None:
        """The whole answer to a request, over a connection that is opened for it."""
        async with aio_channel(self.router) as channel:
            await drain(self.call(channel, request))

    def call(self, channel: grpc.aio.Channel, request: GenerateRequest | bytes) -> grpc.aio.Call:
        metadata = call_metadata(self.key)
        if isinstance(request, bytes):
            return channel.unary_stream("/fissile.v1.GenerationService/Generate")(request, metadata=metadata)
        return GenerationServiceStub(channel).Generate(request, metadata=metadata)

    async def post(self, body: bytes) -> None:
        """And read what comes back, or what can be read of it."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        host, _, port = self.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + body)
            await writer.drain()
            await reader.read()
        finally:
            writer.close()


async def drain(call: grpc.aio.Call) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


async def forever(num_tasks: int, once: Callable[[], Awaitable[None]]) -> None:
    async def repeat() -> None:
        while True:
            try:
                await once()
            except OSError:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(repeat() for _ in range(num_tasks)))


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | fields).encode()


async def huge_bodies(target: Target) -> None:
    """20 at a time, half of them over HTTP."""
    text = (WORDS * (LONGEST // len(WORDS) + 1))[:LONGEST]
    request, http = GenerateRequest(text=text), body(messages=[{"role": "user", "content": text}])
    await asyncio.gather(forever(10, lambda: target.read(request)), forever(10, lambda: target.post(http)))


async def deep_json(target: Target) -> None:
    nested = b'{"messages":[{"role":"user","content":"x"}],"tools":%s}' % (b'{"a":' * 900 + b"1" + b"}" * 900)
    bodies = itertools.cycle([b"[" * 12 * MIB, nested, b'{"messages":%s}' % (b"[" * 900 + b"]" * 900)])
    await forever(16, lambda: target.post(next(bodies)))


async def many_fields(target: Target) -> None:
    """12 MiB of them, over gRPC and over HTTP."""
    number = GenerateRequest.DESCRIPTOR.fields_by_name["prompts"].number
    raw, http = delimited(number, b"") * 6 * MIB, b'{"messages":[%s]}' % b",".join([b"{}"] * 4 * MIB)
    await asyncio.gather(forever(8, lambda: target.read(raw)), forever(8, lambda: target.post(http)))


def long_answer() -> GenerateRequest:
    """Longer than the benchmark lasts. (What it takes the synthetic worker to invent an answer grows with its
    length.)"""
    return GenerateRequest(text="x", options=GenerationOptions(max_tokens=1000, ignore_eos=True))


async def stalled_readers(target: Target, num_connections: int = 1) -> None:
    """2,000 at once that read nothing of a long answer."""
    request = long_answer()
    request.options.sampling.num_logprobs = 64
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(aio_channel(target.router)) for _ in range(num_connections)]
        calls = [target.call(channels[number % num_connections], request) for number in range(2000)]
        await asyncio.Event().wait()
        del calls


async def stalled_connections(target: Target) -> None:
    """The same over 100 connections."""
    await stalled_readers(target, 100)


async def ordinary_streams(target: Target) -> None:
    """No attack: as many at once of a client that reads them. What they cost others is load."""
    async with aio_channel(target.router) as channel:
        await asyncio.gather(*(drain(target.call(channel, long_answer())) for _ in range(2000)))


async def slowloris(target: Target) -> None:
    """2,000 connections over which a request comes a byte at a time."""
    host, _, port = target.http.rpartition(":")

    async def once() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            for byte in itertools.chain(b"POST / HTTP/1.1\r\nx: ", itertools.repeat(120)):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
        finally:
            writer.close()

    await forever(2000, once)


async def tiny_requests(target: Target) -> None:
    """256 at a time, of which half are refused."""
    requests = [GenerateRequest(text="x", options=GenerationOptions(max_tokens=number)) for number in (0, 1)]
    async with aio_channel(target.router) as channel:
        await asyncio.gather(*(forever(128, lambda r=r: drain(target.call(channel, r))) for r in requests))


async def many_logprobs(target: Target) -> None:
    """8 at a time, 128 completions each, with 64 log probabilities a token."""
    request = GenerateRequest(text="x", options=GenerationOptions(max_tokens=200, n=128, ignore_eos=True))
    request.options.sampling.num_logprobs = 64
    await forever(8, lambda: target.read(request))


async def large_grammars(target: Target) -> None:
    """64 at a time, half a megabyte each, and never the same one."""
    numbers = itertools.count()

    async def once() -> None:
        schema = {"enum": [f"{next(numbers)}", *("x" * 500 + str(i) for i in range(1000))]}
        request = GenerateRequest(text="x", options=GenerationOptions(max_tokens=4))
        request.options.sampling.structured_output.json_schema = json.dumps(schema)
        await target.read(request)

    await forever(64, once)


async def reflection_streams(target: Target) -> None:
    """64 connections, each with as many streams of server reflection as it may have, which need no key and ask without
    end."""
    request = ServerReflectionRequest(list_services="")

    async def once() -> None:
        async with aio_channel(target.router) as channel:
            stub = ServerReflectionStub(channel)
            calls = [stub.ServerReflectionInfo(itertools.repeat(request)) for _ in range(100)]
            await asyncio.gather(*map(drain, calls))

    await forever(64, once)


KINDS: dict[str, Callable[[Target], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        huge_bodies,
        deep_json,
        many_fields,
        ordinary_streams,
        stalled_readers,
        stalled_connections,
        slowloris,
        tiny_requests,
        many_logprobs,
        large_grammars,
        reflection_streams,
    )
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    for name in ("router", "http", "key"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    asyncio.run(KINDS[arguments.kind](Target(arguments.router, arguments.http, arguments.key)))
