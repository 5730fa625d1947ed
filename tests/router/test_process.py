"""The router as a process: flags, port file, readiness, memory, signals."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.config import parse_settings
from fissile.channel import aio_channel
from fissile.v1 import GenerateRequest, GenerationServiceStub
from router.config import RouterSettings
from tests.fakes.ports import free_port
from tests.fakes.system import WAIT_SECONDS, collect, until
from tests.fakes.worker import FakeWorker, says

ROOT = Path(__file__).parents[2]
MAX_RSS_BYTES = 300 * 1024 * 1024


async def start(*flags):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


def test_it_serves_says_its_port_stays_small_and_ends_on_a_signal(tmp_path):
    port_file = tmp_path / "port"

    async def scenario():
        worker = FakeWorker(says(" Paris"))
        worker.port = free_port()
        router = await start("--port", "0", "--port-file", str(port_file), "--workers", worker.address)
        try:
            await until(port_file.exists)
            await worker.start()
            async with aio_channel(f"127.0.0.1:{port_file.read_text().strip()}") as channel:
                stub = GenerationServiceStub(channel)
                answer = await collect(stub.Generate(GenerateRequest(text="a"), timeout=20))
            rss = psutil.Process(router.pid).memory_info().rss
            router.terminate()
            out, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        finally:
            if router.returncode is None:
                router.kill()
            await worker.kill()
        return answer.text, rss, router.returncode, out, err.decode(), worker.address

    text, rss, code, out, err, address = asyncio.run(scenario())
    assert (text, code, out) == (" Paris", 0, b"")
    assert rss < MAX_RSS_BYTES
    listening = re.search(r"listening on 127.0.0.1:\d+; waiting for workers at (\S+)\n", err)
    assert listening is not None and listening[1] == address
    assert "ready to serve toy\n" in err
    assert err.rstrip().endswith("stopped")
    assert "Traceback" not in err and "WARNING" not in err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--port", "99999"], "router: --port: Input should be less than or equal to 65535 (got '99999')"),
        (["--tls-key", "x"], "--tls-certificate and --tls-key go together"),
        (["--worker-tls-ca", "x"], "worker-tls-ca and worker-tls-certificate need worker-tls"),
        (["--workers", "dns:///name"], "workers: 'dns:///name' must be host:port, dns:///host:port"),
        (["--policy", "nearest"], "--policy"),
    ],
)
def test_wrong_flags_are_one_clear_line(flags, text, capsys):
    with pytest.raises(SystemExit) as exited:
        parse_settings(RouterSettings, flags, "router")
    err = capsys.readouterr().err
    assert exited.value.code == 2
    assert text in err
    assert "Traceback" not in err


def test_an_unknown_flag_ends_the_process_with_one_clear_line():
    async def scenario():
        router = await start("--nonsense", "1")
        _, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        return router.returncode, err.decode()

    code, err = asyncio.run(scenario())
    assert code == 2
    assert "No such option" in err
    assert "Traceback" not in err


def test_a_taken_port_is_an_error_not_a_traceback():
    async def scenario():
        worker = await FakeWorker(says("x")).start()
        router = await start("--port", str(worker.port))
        _, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        await worker.kill()
        return router.returncode, err.decode()

    code, err = asyncio.run(scenario())
    assert code == 1
    assert "Address already in use" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--tls-certificate", "none.pem", "--tls-key", "none.key"],
        ["--worker-tls", "--worker-tls-certificate", "none.pem", "--worker-tls-key", "none.key"],
    ],
)
def test_a_missing_certificate_is_one_clear_line(flags):
    async def scenario():
        router = await start("--port", "0", *flags)
        _, err = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        return router.returncode, err.decode()

    code, err = asyncio.run(scenario())
    assert code == 1
    assert err.splitlines()[-1] == (
        "router: TLS certificate none.pem with key none.key: [Errno 2] No such file or directory"
    )
    assert "Traceback" not in err


def test_help_documents_tls():
    async def scenario():
        router = await start("--help")
        out, _ = await asyncio.wait_for(router.communicate(), WAIT_SECONDS)
        return " ".join(out.decode().split())

    text = asyncio.run(scenario())
    for flag in ("--tls-certificate", "--tls-client-ca", "--worker-tls-ca", "--worker-tls-certificate"):
        assert flag in text
    assert "(mutual TLS)" in text


def test_a_router_needs_neither_torch_nor_transformers():
    code = "import sys; import router.server; sys.exit(len({'torch', 'transformers'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
