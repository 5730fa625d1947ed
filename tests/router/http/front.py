"""A router with its HTTP front over fake workers, and a plain HTTP client of it."""

import json

import httpx2

from tests.fakes.system import System, run_system
from tests.fakes.worker import FakeWorker, says


def run_front(scenario, *workers, **settings):
    """Run `scenario(client, system)`, an httpx2 client of the front; returns its result."""

    async def with_client(system: System):
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{system.router.http_port}", timeout=20) as client:
            return await scenario(client, system)

    return run_system(with_client, *workers, http_port=0, **settings)


def get(path, *workers, headers=None, **settings):
    """Of a worker that says something, if it does not matter which."""

    async def scenario(client, system):
        return await client.get(path, headers=headers)

    return run_front(scenario, *(workers or [FakeWorker(says("b"))]), **settings)


def ask(worker, path, body, **settings):
    """The response to one request; afterwards nothing is open anywhere."""

    async def scenario(client, system):
        response = await client.post(path, json=body)
        await system.quiet()
        return response

    return run_front(scenario, worker, **settings)


def complete(worker, **body):
    return ask(worker, "/v1/completions", {"model": "toy", "prompt": "a", **body})


def chat(worker, **body):
    messages = [{"role": "user", "content": "a"}]
    return ask(worker, "/v1/chat/completions", {"model": "toy", "messages": messages, **body})


def events(response):
    """The JSON of each event; the stream must end as OpenAI's do."""
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    data = [part.removeprefix("data: ") for part in parts if not part.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(part) for part in data]


def choices_of(chunks):
    """The joined text and the finish reason of each choice."""
    result = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, end = result.get(choice["index"], ("", None))
            assert end is None, "something came after the end"
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            result[choice["index"]] = (text + new, choice["finish_reason"])
    return result
