"""A service of a compose file as a process on this machine, and what its image says."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_SECONDS = 40


@dataclass(frozen=True)
class Image:
    """What a Dockerfile says about a running container."""

    entrypoint: list[str]
    environment: dict[str, str]
    ports: set[int]

    @classmethod
    def of(cls, dockerfile: Path) -> "Image":
        text = dockerfile.read_text().replace("\\\n", " ")

        def values(instruction: str) -> list[str]:
            return [
                word for line in re.findall(rf"^{instruction} (.+)$", text, re.MULTILINE) for word in shlex.split(line)
            ]

        (entrypoint,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
        environment = dict(word.split("=", 1) for word in values("ENV"))
        return cls(json.loads(entrypoint), environment, {int(port) for port in values("EXPOSE")})


class LocalContainer:
    """Runs a service's own command with its own environment; ports and host names are mapped to loopback."""

    def __init__(self, name: str, service: dict[str, Any], image: Image, port: int, http_port: int, log: Path) -> None:
        self.name, self.log, self.http_port = name, log, http_port
        self._service, self._image, self._port = service, image, port
        self._kind = "ROUTER" if name == "router" else "WORKER"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self, addresses: dict[str, str]) -> None:
        """`addresses`: inside → outside, of names in its environment."""
        environment = self._image.environment | {
            key: _defaults(str(value)) for key, value in self._service["environment"].items()
        }
        for inside, outside in addresses.items():
            environment = {key: value.replace(inside, outside) for key, value in environment.items()}
        environment |= {
            f"FISSILE_{self._kind}_HOST": "127.0.0.1",
            f"FISSILE_{self._kind}_PORT": str(self._port),
            "FISSILE_ROUTER_HTTP_HOST": "127.0.0.1",
            "FISSILE_ROUTER_HTTP_PORT": str(self.http_port),
            f"FISSILE_{self._kind}_METRICS_HOST": "127.0.0.1",
            f"FISSILE_{self._kind}_METRICS_PORT": "0",
        }
        program, *arguments = self._image.entrypoint
        command = [Path(sys.executable).parent / program, *arguments]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=output)

    def health_arguments(self) -> list[str]:
        """Those of its own health check, at the mapped address."""
        _cmd, _python, _p, _m, _module, _address, *rest = self._service["healthcheck"]["test"]
        return [self.address, *rest]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int | None:
        """SIGTERM, as `docker compose stop` does; the exit code."""
        if self._process is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)


def _defaults(value: str) -> str:
    """`${NAME:-default}` → default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
