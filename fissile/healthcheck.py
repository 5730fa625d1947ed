"""Ask a service for its gRPC health (grpc.health.v1). For containers and scripts:

    python -m fissile.healthcheck HOST:PORT [--service NAME] [--wait SECONDS]
        [--ca FILE [--certificate FILE --key FILE]]

Exits 0 when it answers SERVING, 1 with one line otherwise. `--wait` keeps asking for so long.
"""

import argparse
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fissile.channel import channel
from fissile.tls import ClientTls

_ATTEMPT_SECONDS = 5.0
_PAUSE_SECONDS = 0.2


def health(address: str, service: str = "", tls: ClientTls | None = None, timeout: float = _ATTEMPT_SECONDS) -> str:
    """The status in upper case: SERVING, NOT_SERVING, or the gRPC status of a call that failed (UNAVAILABLE, …)."""
    with channel(address, tls) as connection:
        stub = health_pb2_grpc.HealthStub(connection)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return str(code.name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def wait_until_serving(address: str, wait: float, service: str = "", tls: ClientTls | None = None) -> str:
    """Ask until SERVING or until `wait` seconds have passed; returns the last status."""
    deadline = time.monotonic() + wait
    while True:
        status = health(address, service, tls)
        if status == "SERVING" or time.monotonic() >= deadline:
            return status
        time.sleep(_PAUSE_SECONDS)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fissile.healthcheck", description="Ask for gRPC health.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("--service", default="", help="which service; default: the server as a whole")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to keep asking")
    parser.add_argument("--ca", type=Path, help="CA certificate in PEM: connect with TLS")
    parser.add_argument("--certificate", type=Path, help="certificate in PEM to show, with --key")
    parser.add_argument("--key", type=Path, help="its key in PEM")
    arguments = parser.parse_args(argv)
    tls = ClientTls(arguments.ca, arguments.certificate, arguments.key) if arguments.ca else None
    status = wait_until_serving(arguments.address, arguments.wait, arguments.service, tls)
    if status == "SERVING":
        return 0
    print(f"{arguments.address}: {status}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
