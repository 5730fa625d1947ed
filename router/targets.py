"""What `--workers` may name: addresses, and places where addresses are found."""

import re
from dataclasses import dataclass
from pathlib import Path

_HOST = r"(?:\[[0-9A-Fa-f:.%a-z]+\]|[^\s:/\[\]]+)"
_ADDRESS = re.compile(rf"{_HOST}:(?P<port>[0-9]{{1,5}})")
_NAME = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SERVICE = re.compile(rf"(?P<service>{_NAME})(?:\.(?P<namespace>{_NAME}))?:(?P<port>{_NAME})")
FORMS = "host:port, dns:///host:port, file:///path or kubernetes:///service.namespace:port"


@dataclass(frozen=True, slots=True)
class StaticTarget:
    """One worker."""

    address: str

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """All addresses of a name."""

    name: str
    """host:port."""

    def __str__(self) -> str:
        return f"dns:///{self.name}"


@dataclass(frozen=True, slots=True)
class FileTarget:
    """Addresses in a file, one a line."""

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    """The pods of a service."""

    service: str
    namespace: str
    """Empty: the router's own."""
    port: str
    """A number, or the name of a port of the service."""

    def __str__(self) -> str:
        return f"kubernetes:///{self.service}{'.' if self.namespace else ''}{self.namespace}:{self.port}"


Target = StaticTarget | DnsTarget | FileTarget | KubernetesTarget


def is_address(text: str) -> bool:
    """host:port, the port a number."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 65536


def parse_target(text: str) -> Target:
    """Raises ValueError."""
    scheme, separator, rest = text.partition(":///")
    if not separator and is_address(text):
        return StaticTarget(text)
    if scheme == "dns" and is_address(rest):
        return DnsTarget(rest)
    if scheme == "file" and rest:
        return FileTarget(Path("/") / rest)
    service = _SERVICE.fullmatch(rest)
    if scheme == "kubernetes" and service and (not service["port"].isdigit() or 0 < int(service["port"]) < 65536):
        return KubernetesTarget(service["service"], service["namespace"] or "", service["port"])
    raise ValueError(f"{text!r} must be {FORMS}")
