"""Streams of the OpenAI HTTP interface, read as cheaply as Python can: the same for all that are measured."""

import asyncio
import json
import time

from bench.peers.openai_stub import MODEL

PROMPT = "What does a router cost?"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Connection:
    """Kept open; one stream at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str) -> None:
        self._reader, self._writer, self._model = reader, writer, model

    @classmethod
    async def open(cls, port: int, model: str = MODEL) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port), model)

    async def complete(self, num_tokens: int) -> int:
        """Tokens of a whole stream. Raises RuntimeError for another status than 200, or an answer cut short."""
        wanted = {"model": self._model, "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "stop": ["never"]}
        body = json.dumps(wanted).encode()
        self._writer.write(_HEAD % len(body) + body)
        status = await self._reader.readline()
        while (await self._reader.readline()).strip():
            pass
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}")
        events = bytearray()
        while size := int(await self._reader.readline(), 16):
            events += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        if b"[DONE]" not in events:
            raise RuntimeError(f"the stream ended without [DONE]: {bytes(events[-200:])!r}")
        return num_tokens

    def close(self) -> None:
        self._writer.close()


async def tokens_per_second(port: int, num_streams: int, num_tokens: int, model: str = MODEL) -> float:
    return await _rate(port, num_streams, num_streams, num_tokens, model) * num_tokens


async def requests_per_second(port: int, num_streams: int, num_requests: int, model: str = MODEL) -> float:
    """Of one token each."""
    return await _rate(port, num_streams, num_requests, 1, model)


async def _rate(port: int, num_streams: int, num_requests: int, num_tokens: int, model: str) -> float:
    connections = [await Connection.open(port, model) for _ in range(num_streams)]
    left = iter(range(num_requests))

    async def client(connection: Connection) -> None:
        for _ in left:
            await connection.complete(num_tokens)

    begin = time.perf_counter()
    await asyncio.gather(*map(client, connections))
    seconds = time.perf_counter() - begin
    for connection in connections:
        connection.close()
    return num_requests / seconds


async def latencies(router_port: int, worker_port: int, num_pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of a request of one token, one at a time: through the router and at the worker, taking turns."""
    connections = [await Connection.open(port) for port in (router_port, worker_port)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(num_pairs):
        for connection, values in zip(connections, seconds, strict=True):
            begin = time.perf_counter()
            await connection.complete(1)
            values.append(time.perf_counter() - begin)
    for connection in connections:
        connection.close()
    return seconds
