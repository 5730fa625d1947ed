"""A service of a compose file as a process on this machine."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

STOP_SECONDS = 40


class LocalContainer:
    """Runs a service's own command with its own environment; ports and host names are mapped to loopback."""

    def __init__(self, name: str, service: dict[str, Any], port: int, http_port: int, log: Path) -> None:
        self.name, self.log, self.http_port = name, log, http_port
        self._service, self._port = service, port
        self._kind = "ROUTER" if name == "router" else "WORKER"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def inside_address(self) -> str:
        """As other containers reach it."""
        return f"{self.name}:{self._service['environment'][f'FISSILE_{self._kind}_PORT']}"

    @property
    def outside_address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self, addresses: dict[str, str]) -> None:
        """`addresses`: inside → outside, of all containers."""
        environment = {key: _defaults(str(value)) for key, value in self._service["environment"].items()}
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
        command = [sys.executable, *self._service["command"][1:]]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=output)

    def health_arguments(self) -> list[str]:
        """Those of its own health check, at the mapped address."""
        _cmd, _python, _p, _m, _module, _address, *rest = self._service["healthcheck"]["test"]
        return [self.outside_address, *rest]

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
