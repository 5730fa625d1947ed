"""The compose file: valid by the compose schema, and its very commands and environment work as local processes."""

import importlib.resources
import json
import re
import time
import urllib.request
from pathlib import Path

import jsonschema
import pytest
import yaml

from fissile import Client
from fissile.healthcheck import main as healthcheck
from router.config import RouterSettings
from tests.deploy.local_container import Image, LocalContainer
from tests.fakes.ports import free_ports
from worker.config import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OBSERVERS = {name: each for name, each in COMPOSE["services"].items() if each.get("profiles") == ["observe"]}
"""What others have made, to look at ours."""
SERVICES = {name: each for name, each in COMPOSE["services"].items() if name not in OBSERVERS}
METRICS = {kind: f"FISSILE_{kind.upper()}_METRICS_PORT" for kind in ("router", "worker")}
WORKERS = "dns:///workers:50061"


def started_by(*profiles: str) -> list[str]:
    """Services that `docker compose --profile ... up` starts."""
    return [name for name, service in SERVICES.items() if set(service.get("profiles", profiles)) & set(profiles)]


def image_of(name: str) -> Image:
    return Image.of(ROOT / SERVICES[name]["build"]["dockerfile"])


def settings_of(name: str, monkeypatch) -> RouterSettings | WorkerSettings:
    """Of a container that is run without anything else."""
    for key, value in image_of(name).environment.items():
        monkeypatch.setenv(key, value)
    return RouterSettings() if name == "router" else WorkerSettings()


def test_it_follows_the_compose_schema():
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(COMPOSE, json.loads(vendored.read_text()))


def test_where_no_profile_is_named_it_is_that_of_cpus():
    (profile,) = re.findall(r"^COMPOSE_PROFILES=(\w+)$", (ROOT / ".env").read_text(), re.MULTILINE)
    assert profile == "cpu"


@pytest.mark.parametrize(
    ("profile", "services"),
    [
        ("cpu", ["router", "worker-0", "worker-1"]),
        ("cuda", ["router", "worker-cuda"]),
        ("rocm", ["router", "worker-rocm"]),
    ],
)
def test_a_profile_starts_its_workers_and_no_others(profile, services):
    assert started_by(profile) == services


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "router"])
def test_the_router_finds_every_worker(name, monkeypatch):
    assert SERVICES["router"]["environment"]["FISSILE_ROUTER_WORKERS"] == WORKERS
    assert SERVICES[name]["networks"]["default"]["aliases"] == ["workers"]
    assert WORKERS.endswith(f":{settings_of(name, monkeypatch).port}")


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_listens_on_what_it_exposes_and_on_all_addresses(name, monkeypatch):
    settings = settings_of(name, monkeypatch).model_dump()
    ports = {field: settings[field] for field in ("port", "http_port", "metrics_port") if field in settings}
    assert set(ports.values()) == image_of(name).ports
    assert {settings[field.replace("port", "host")] for field in ports} == {"0.0.0.0"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_health_check_and_an_image_that_can_be_built(name, monkeypatch):
    service = SERVICES[name]
    address = f"127.0.0.1:{settings_of(name, monkeypatch).port}"
    assert service["healthcheck"]["test"] == ["CMD", "python", "-P", "-m", "fissile.healthcheck", address]
    allowed = (ROOT / ".dockerignore").read_text().split()
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for path in source.split():
            is_sent = any(f"!{folder}" in allowed for folder in (path, *Path(path).parents))
            assert (ROOT / path).exists() and is_sent, path


def test_the_router_image_has_no_torch():
    assert "torch" not in (ROOT / "deploy" / "router.Dockerfile").read_text().replace("no torch", "")


@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_exists(name):
    """A misspelt variable would be ignored in silence."""
    known = {f"FISSILE_ROUTER_{field}".upper() for field in RouterSettings.model_fields}
    known |= {f"FISSILE_WORKER_{field}".upper() for field in WorkerSettings.model_fields}
    environment = image_of(name).environment | SERVICES[name]["environment"]
    ours = {key for key in environment if key.startswith("FISSILE_")}
    assert ours <= known


def test_what_observes_is_reached_from_this_machine_alone_and_finds_its_files():
    assert OBSERVERS.keys() == {"prometheus", "grafana", "jaeger"}
    for service in OBSERVERS.values():
        assert service["profiles"] == ["observe"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert ":" in service["image"] and not service["image"].endswith(":latest")
        for volume in service.get("volumes", []):
            assert (ROOT / volume.split(":")[0]).exists(), volume


def test_prometheus_scrapes_what_the_images_expose():
    jobs = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
    router, worker = jobs
    assert router["static_configs"] == [{"targets": [f"router:{image_of('router').environment[METRICS['router']]}"]}]
    (found,) = worker["dns_sd_configs"]
    assert found["names"] == SERVICES["worker-0"]["networks"]["default"]["aliases"]
    ports = {image_of(name).environment[METRICS["worker"]] for name in SERVICES if name != "router"}
    assert {str(found["port"])} == ports


def test_the_same_commands_run_as_processes(tmp_path):
    """Only what the network of containers gives is replaced: names and addresses become loopback ports."""
    names = started_by("cpu")
    http_port, *ports = free_ports(1 + len(names))
    containers = {
        name: LocalContainer(name, SERVICES[name], image_of(name), port, http_port, log=tmp_path / f"{name}.log")
        for name, port in zip(names, ports, strict=True)
    }
    addresses = {WORKERS: ",".join(containers[name].address for name in names if name != "router")}
    try:
        for container in containers.values():
            container.start(addresses)
        deadline = time.monotonic() + 120
        for container in containers.values():
            while healthcheck(container.health_arguments()) != 0:
                assert container.is_running and time.monotonic() < deadline, container.log.read_text()[-2000:]
                time.sleep(0.5)
        with Client(containers["router"].address) as client:
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
    assert codes == dict.fromkeys(names, 0), "SIGTERM is a clean end"
