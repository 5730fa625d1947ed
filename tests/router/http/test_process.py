"""The front of a router that is a process of its own."""

import asyncio
import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx2

from tests.fakes.system import WAIT_SECONDS, until
from tests.fakes.worker import FakeWorker, says

ROOT = Path(__file__).parents[3]


async def start(*flags, **environment):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--port", "0", *flags, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
    )


def test_it_serves_says_its_port_and_ends_on_a_signal(tmp_path):
    port_file = tmp_path / "http"

    async def scenario():
        worker = await FakeWorker(says(" Paris")).start()
        flags = ("--workers", worker.address, "--http-port", "0", "--http-port-file", str(port_file))
        flags += ("--log-format", "json")
        router = await start(*flags, FISSILE_ROUTER_API_KEY="secret")
        try:
            await until(port_file.exists)
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1/completions"
            async with httpx2.AsyncClient(headers={"authorization": "Bearer secret"}, timeout=20) as client:
                answer = await client.post(url, json={"prompt": "a"})
                router.terminate()  # with a connection that is still open
                _, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        finally:
            if router.returncode is None:
                router.kill()
            await worker.kill()
        return answer.json()["choices"][0]["text"], router.returncode, err.decode()

    text, code, err = asyncio.run(scenario())
    assert (text, code) == (" Paris", 0)
    entries = [json.loads(line) for line in err.splitlines()]
    assert any(entry["message"].startswith("HTTP on http://127.0.0.1:") for entry in entries)
    assert entries[-1]["message"] == "stopped"
    assert {entry["level"] for entry in entries} == {"info"}
    assert [entry["end"] for entry in entries if entry["logger"] == "router.account"] == ["eos"]
    assert "secret" not in err


def test_a_taken_port_ends_it():
    async def scenario():
        worker = await FakeWorker(says("x")).start()
        router = await start("--http-port", str(worker.port))
        _, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        await worker.kill()
        return worker.port, router.returncode, err.decode()

    port, code, err = asyncio.run(scenario())
    assert code == 1
    assert err.splitlines()[-1] == f"router: cannot listen on 127.0.0.1:{port} for HTTP: Address already in use"


def test_a_burst_of_connections_does_not_use_up_the_open_files(tmp_path):
    port_file = tmp_path / "http"

    async def scenario():
        router = await asyncio.create_subprocess_exec(
            "bash", "-c", 'ulimit -n 96; exec "$0" "$@"',
            sys.executable, "-m", "router", "--port", "0", "--http-port", "0", "--http-port-file", str(port_file),
            cwd=ROOT, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        with ExitStack() as stack:
            stack.callback(lambda: router.returncode is None and router.kill())
            await until(port_file.exists)
            address = "127.0.0.1", int(port_file.read_text())
            for _ in range(200):
                stack.enter_context(socket.create_connection(address))
            async with httpx2.AsyncClient(timeout=20) as client:
                crowded = await client.get(f"http://{address[0]}:{address[1]}/health")
            router.terminate()
            _, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        return crowded, err.decode()

    crowded, err = asyncio.run(scenario())
    assert crowded.status_code == 429 and "of 16 are taken" in crowded.json()["error"]["message"]
    assert "a port takes 16 connections, not 4096" in err
    assert "Too many open files" not in err
