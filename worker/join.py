"""`fissile join`: a tensor-parallel rank on this host for a worker on another one.

It reads the variables that torchrun and its like set, a process a rank, connects to the worker, and is a rank like the
others from then on: it ends when the worker does, and the worker when it does. What starts it starts it again.
"""

import logging
import sys
import time

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from common.config import Settings, parse_settings
from common.logging import setup_logging
from common.version import package_version
from worker.processes.messages import receive, send
from worker.processes.tcp import MIN_SECRET_LENGTH, HandshakeError, TcpConnection, connect
from worker.runner.messages import Join, Place, Refused, Setup

logger = logging.getLogger("worker.join")

EXIT_FAILURE = 1
JOIN_SECONDS = 600.0
"""For the worker to start listening: a launcher starts all at once."""
PAUSE_SECONDS = 0.5


class JoinSettings(Settings):
    """Run a tensor-parallel rank for a worker on another host, which was started with --remote-ranks."""

    model_config = SettingsConfigDict(env_prefix="")

    master_addr: str = Field(description="The worker's --ranks-host, as this host reaches it.")
    master_port: int = Field(ge=1, le=65535, description="The worker's --ranks-port.")
    world_size: int = Field(ge=2, description="The worker's --tensor-parallel-size.")
    rank: int = Field(ge=0, description="Which of these ranks this is.")
    first_rank: int = Field(0, ge=0, description="Added to --rank, where a launcher counts the ranks of its host only.")
    local_rank: int = Field(0, ge=0, description="Which rank of this host it is: the number of its GPU.")
    local_world_size: int = Field(1, ge=1, description="Ranks on this host; they share its CPUs.")
    fissile_ranks_secret: SecretStr = Field(
        description="The worker's --ranks-secret. Better in the environment: flags can be seen by others."
    )

    @field_validator("fissile_ranks_secret")
    @classmethod
    def _check_secret(cls, secret: SecretStr) -> SecretStr:
        if len(secret.get_secret_value()) < MIN_SECRET_LENGTH:
            raise ValueError(f"must have at least {MIN_SECRET_LENGTH} characters")
        return secret


class JoinError(Exception):
    """The worker does not want this rank."""


def main() -> None:
    settings = parse_settings(JoinSettings, sys.argv[1:], "join")
    setup_logging("info", "text")
    try:
        connection = _connect(settings)
        setup = _introduce(connection, settings)
    except (EOFError, OSError, JoinError) as error:
        print(f"join: {error or 'the worker hung up'}", file=sys.stderr)
        raise SystemExit(EXIT_FAILURE) from error
    setup_logging(setup.log_level, setup.log_format)  # type: ignore[arg-type]
    # Only now: it imports torch, which takes seconds.
    from worker.runner.rank import serve_rank

    place = Place(settings.local_rank, settings.local_world_size, settings.master_addr)
    serve_rank(connection, connection, setup, place)


def _connect(settings: JoinSettings) -> TcpConnection:
    """Tries again while nobody listens. Raises OSError."""
    deadline = time.monotonic() + JOIN_SECONDS
    secret = settings.fissile_ranks_secret.get_secret_value().encode()
    logger.info("joining the worker at %s:%d", settings.master_addr, settings.master_port)
    while True:
        try:
            return connect(settings.master_addr, settings.master_port, secret)
        except HandshakeError:
            raise
        except (EOFError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_SECONDS)


def _introduce(connection: TcpConnection, settings: JoinSettings) -> Setup:
    send(connection, Join(settings.first_rank + settings.rank, settings.world_size, package_version()))
    answer: Setup | Refused = receive(connection)
    if isinstance(answer, Refused):
        raise JoinError(answer.reason)
    return answer


if __name__ == "__main__":
    main()
