"""gRPC's own retries, which a client in any language turns on by a `retryPolicy`: they are for calls that end before
any headers, and wait as long as the server says."""

import asyncio
import json
import re
from pathlib import Path

import grpc
import pytest

from fissile.v1 import GenerateRequest, GenerationServiceStub
from router import service
from tests.fakes.ports import free_port
from tests.fakes.system import collect, error_of, run_system
from tests.fakes.worker import FakeWorker, counts, says

PAGE = Path(__file__).parents[2] / "docs/clients.md"


def service_config():
    """The one that the page for clients shows, but for its backoff."""
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = json.loads(text)
    config["methodConfig"][0]["retryPolicy"].update(initialBackoff="100s", maxBackoff="100s")
    return config


OPTIONS = [("grpc.service_config", json.dumps(service_config())), ("grpc.use_local_subchannel_pool", 1)]


def test_a_refused_request_comes_again_when_the_router_said():
    """Long before the client's own backoff."""
    worker = FakeWorker(counts(40), step_seconds=0.01)

    async def scenario(system):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.port}", OPTIONS) as channel:
            first = system.stub.Generate(GenerateRequest(text="a"))
            await first.read()
            second = GenerationServiceStub(channel).Generate(GenerateRequest(text="b"), timeout=60)
            await asyncio.gather(collect(first), collect(second))
        return dict(system.router.parts.metrics.finished)

    assert run_system(scenario, worker, max_open_requests=1) == {"resource_exhausted": 1, "length": 2}


@pytest.mark.parametrize("seconds", [0.0, 1e-3, 60.0])
def test_headers_of_a_stream_whenever_they_go(monkeypatch, seconds):
    """Alone, while the first message or the status comes, or with it."""
    monkeypatch.setattr(service, "HEADERS_SECONDS", seconds)

    async def scenario(system):
        answers = [await system.ask(GenerateRequest(text="a")) for _ in range(3)]
        errors = [await error_of(system.ask(GenerateRequest(text="a", model="none"))) for _ in range(3)]
        await system.quiet()
        return [answer.text for answer in answers], [str(error) for error in errors]

    texts, errors = run_system(scenario, FakeWorker(says("x y"), step_seconds=1e-3))
    assert texts == ["x y"] * 3 and errors == ["model 'none' is not served here; there is toy"] * 3


def test_headers_come_before_a_late_refusal():
    """Whoever waits for headers alone must not take a router for dead that waits for a worker."""

    async def scenario(system):
        call = system.stub.Generate(GenerateRequest(text="a"))
        async with asyncio.timeout(service.HEADERS_SECONDS + 10):
            await call.initial_metadata()
        is_open = not call.done()
        call.cancel()
        return is_open

    assert run_system(scenario, wait_ready=False, worker_wait=60.0, workers=f"127.0.0.1:{free_port()}")
