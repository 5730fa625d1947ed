"""The manifests: what they say of each other and of the services is so. No cluster has run them."""

from pathlib import Path

import yaml

from router.config import RouterSettings
from router.targets import KubernetesTarget
from tests.deploy.local_container import Image
from worker.config import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = {
    (about["kind"], about["metadata"]["name"]): about
    for about in yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
}


def container_of(deployment):
    (container,) = OBJECTS["Deployment", deployment]["spec"]["template"]["spec"]["containers"]
    return container


def settings_of(kind, deployment, image, monkeypatch):
    """Of its container: the image's own variables, then those of the manifest."""
    given = {entry["name"]: entry["value"] for entry in container_of(deployment)["env"] if "value" in entry}
    for name, value in (Image.of(ROOT / f"deploy/{image}.Dockerfile").environment | given).items():
        monkeypatch.setenv(name, value)
    return kind()


def test_the_router_finds_the_service_of_the_workers_and_may_ask_for_it(monkeypatch):
    settings = settings_of(RouterSettings, "fissile-router", "router", monkeypatch)
    (target,) = settings.targets()
    assert target == KubernetesTarget("fissile-workers", "", "grpc")
    service = OBJECTS["Service", target.service]["spec"]
    assert service["ports"] == [{"name": "grpc", "port": 50061, "targetPort": "grpc"}]
    pods = OBJECTS["Deployment", "fissile-workers"]["spec"]["template"]
    assert service["selector"].items() <= pods["metadata"]["labels"].items()
    (rule,) = OBJECTS["Role", "fissile-router"]["rules"]
    assert rule == {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    pod = OBJECTS["Deployment", "fissile-router"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == OBJECTS["RoleBinding", "fissile-router"]["subjects"][0]["name"]


def test_ports_are_those_that_the_services_listen_on_and_pods_outlive_a_drain(monkeypatch):
    router = settings_of(RouterSettings, "fissile-router", "router", monkeypatch)
    worker = settings_of(WorkerSettings, "fissile-workers", "worker.cpu", monkeypatch)
    listening = {"fissile-router": [router.port, router.http_port, router.metrics_port]}
    listening["fissile-workers"] = [worker.port, worker.metrics_port]
    for name, ports in listening.items():
        assert [port["containerPort"] for port in container_of(name)["ports"]] == ports
        assert container_of(name)["readinessProbe"] == {"grpc": {"port": ports[0]}}
        pod = OBJECTS["Deployment", name]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > max(router.drain_timeout, worker.drain_timeout)
