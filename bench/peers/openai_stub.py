"""A worker without a model behind the OpenAI HTTP interface, for routers that speak that: tokens at no cost.

    python -m bench.peers.openai_stub --port-file FILE

Streams one event a token, each written by itself and in turn with those of other streams, as an engine's steps do.
"""

import argparse
import asyncio
import json
from pathlib import Path

MODEL = "stub"
_ANSWERS = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]},
    "/get_model_info": {"model_path": MODEL, "is_generation": True},
    "/model_info": {"model_path": MODEL, "is_generation": True},
    "/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "tp_size": 1},
    "/server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "tp_size": 1},
    "/get_load": [],
    "/version": {"version": "0.0.0"},
}
"""What routers ask of a worker to learn what it is; `/health` needs no body."""
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve(port_file: Path) -> None:
    server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
    partial = port_file.with_suffix(".partial")
    partial.write_text(f"{server.sockets[0].getsockname()[1]}\n")
    partial.replace(port_file)
    async with server:
        await server.serve_forever()


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, one after the other."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            method, path = first.split(" ")[:2]
            if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
                await stream(writer, json.loads(body).get("max_tokens", 16), is_chat="chat" in path)
            else:
                raw = json.dumps(_ANSWERS.get(path.partition("?")[0], {})).encode()
                kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw)
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind + raw)
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def stream(writer: asyncio.StreamWriter, num_tokens: int, *, is_chat: bool) -> None:
    writer.write(_STREAM)
    for i in range(num_tokens):
        finish = "length" if i == num_tokens - 1 else None
        text = {"delta": {"content": " token"}} if is_chat else {"text": " token"}
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **text}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        event = {"id": "stub-1", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}
        writer.write(chunk(f"data: {json.dumps(event)}\n\n".encode()))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
    await writer.drain()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    asyncio.run(serve(parser.parse_args().port_file))
