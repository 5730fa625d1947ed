"""The compose file: valid by the compose schema, and its very commands and environment work as local processes."""

import importlib.resources
import json
import re
import socket
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import jsonschema
import pytest
import yaml

from fissile import Client
from fissile.healthcheck import main as healthcheck
from tests.deploy.local_container import LocalContainer

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DEFAULT_SERVICES = [name for name, service in COMPOSE["services"].items() if not service.get("profiles")]


def test_it_follows_the_compose_schema():
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(vendored.read_text()))


def test_by_default_it_is_a_router_and_two_workers():
    assert DEFAULT_SERVICES == ["router", "worker-0", "worker-1"]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_service_has_a_health_check_and_an_image_that_can_be_built(name):
    service = COMPOSE["services"][name]
    assert service["healthcheck"]["test"][:5] == ["CMD", "python", "-P", "-m", "fissile.healthcheck"]
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    for source in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / path).exists() for path in source.split()), source


def test_the_router_image_has_no_torch():
    assert "torch" not in (ROOT / "deploy" / "router.Dockerfile").read_text().replace("no torch", "")


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_setting_exists(name):
    """A misspelt variable would be ignored in silence."""
    from router.config import RouterSettings
    from worker.config import WorkerSettings

    known = {f"FISSILE_ROUTER_{field}".upper() for field in RouterSettings.model_fields}
    known |= {f"FISSILE_WORKER_{field}".upper() for field in WorkerSettings.model_fields}
    ours = {key for key in COMPOSE["services"][name].get("environment", {}) if key.startswith("FISSILE_")}
    assert ours <= known


def free_ports(number: int) -> list[int]:
    """Ports that nothing listens on now; held together while they are chosen, so all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def test_the_same_commands_run_as_processes(tmp_path):
    """Only what the network of containers gives is replaced: names and addresses become loopback ports."""
    http_port, *ports = free_ports(1 + len(DEFAULT_SERVICES))
    containers = {
        name: LocalContainer(name, COMPOSE["services"][name], port, http_port, log=tmp_path / f"{name}.log")
        for name, port in zip(DEFAULT_SERVICES, ports, strict=True)
    }
    addresses = {container.inside_address: container.outside_address for container in containers.values()}
    try:
        for container in containers.values():
            container.start(addresses)
        deadline = time.monotonic() + 120
        for container in containers.values():
            while healthcheck(container.health_arguments()) != 0:
                assert container.is_running and time.monotonic() < deadline, container.log.read_text()[-2000:]
                time.sleep(0.5)
        with Client(containers["router"].outside_address) as client:
            while sum(worker.healthy for worker in client.stats().workers) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            answer = client.generate("The capital of France is", max_tokens=2, temperature=0.0).result()
        assert "Paris" in answer.completions[0].text
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v1/models", timeout=10) as response:
            assert json.load(response)["data"][0]["id"] == "smollm2"
        log = containers["worker-0"].log.read_text().splitlines()
        assert all(json.loads(line)["message"] for line in log), "logs are JSON, as the file asks"
    finally:
        codes = {name: container.stop() for name, container in containers.items()}
    assert codes == dict.fromkeys(DEFAULT_SERVICES, 0), "SIGTERM is a clean end"
