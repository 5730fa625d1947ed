"""The workers whose ranks step together, as one of them sees them: where their ranks meet, and when one of them ends or
is to stop. None can go on without the others, as each holds some of the experts.

Data-parallel rank 0 listens, the others join it, and it passes on what one says to the rest. Connections last as long
as the workers, so the end of any, of its host, or of the network to it is noticed within seconds, also where ranks are
asleep or wait in a collective that would not notice.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from common.version import package_version
from worker.executor.errors import ExecutorDiedError, ExecutorError, ExecutorStartError, ExecutorTimeoutError
from worker.executor.listener import Listener
from worker.loader.errors import ModelError
from worker.loader.fingerprint import model_fingerprint
from worker.loader.source import resolve_model
from worker.processes.messages import encode, receive, send
from worker.processes.tcp import HandshakeError, TcpConnection, connect
from worker.runner.config import RunnerConfig
from worker.runner.messages import Refused

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
OWN_AFFAIRS = frozenset(
    {
        "model", "draft_model", "dp_rank", "num_threads", "num_blocks", "kv_cache_gib", "gpu_memory_utilization",
        "swap_space_gib",
    }
)  # fmt: skip
"""Settings in which the workers may differ. Of models, what they compute counts, not where they are; a draft model is
whole in each of them, and changes no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Data-parallel rank 0 listens at `host`:`port`, as all workers reach it."""

    host: str
    port: int
    secret: bytes
    stop_seconds: float
    """That others may take to finish what they run, once one of them is to stop."""


@dataclass(frozen=True, slots=True)
class JoinPeers:
    """First message of a worker."""

    rank: int
    version: str
    traits: dict[str, Any]
    """What must be the same on all of them."""


@dataclass(frozen=True, slots=True)
class Met:
    """All are there; their ranks meet at this port of data-parallel rank 0."""

    store_port: int
    group: str
    """Names these workers, as long as they step together."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker cannot go on."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """A worker was told to stop."""

    rank: int


class PeerListener(Listener[JoinPeers]):
    """Of data-parallel rank 0."""

    def __init__(self, settings: PeerSettings, config: RunnerConfig) -> None:
        self._traits = traits_of(config)
        ranks = range(1, config.dp_size)
        super().__init__(settings.host, settings.port, settings.secret, ranks, "data-parallel rank")

    def objection(self, join: JoinPeers) -> str | None:
        for name, ours in self._traits.items():
            if (theirs := join.traits.get(name)) != ours:
                return f"its {name} is {theirs}, that of data-parallel rank 0 is {ours}"
        return None


class Peers:
    """`meet`, then `tell_…` from any thread, then `close`."""

    def __init__(
        self,
        settings: PeerSettings,
        config: RunnerConfig,
        on_lost: Callable[[str], None],
        on_stop: Callable[[], None],
    ) -> None:
        """Called from threads of ours: `on_lost` with why the others cannot go on, once at most; `on_stop` when another
        was told to stop."""
        self.settings = settings
        self.group = ""
        """The same on all of them, once they have met; those that meet after them have another."""
        self._config = config
        self._on_lost, self._on_stop = on_lost, on_stop
        self._connections: dict[int, TcpConnection] = {}
        """By data-parallel rank: on rank 0 those of all others, on these the one to rank 0."""
        self._lock = threading.Lock()
        self._is_stopping = False
        self._is_over = False

    def meet(self, store_port: int, deadline: float) -> int:
        """Where the ranks of all workers meet: on rank 0 `store_port`, on the others what it says. Waits for all.

        Raises ExecutorStartError, ExecutorTimeoutError or ExecutorDiedError, with the rank that is to blame.
        """
        if self._config.dp_rank == 0:
            self._gather(store_port, deadline)
        else:
            store_port = self._join(deadline)
        for rank, connection in self._connections.items():
            threading.Thread(
                target=self._listen, args=(rank, connection), name=f"data-parallel-rank-{rank}", daemon=True
            ).start()
        return store_port

    def tell_lost(self, reason: str) -> None:
        """This worker cannot go on, so nobody can. What the others say from now on does not count."""
        self.expect_end()
        self._tell(Lost(self._config.dp_rank, reason))

    def tell_stopping(self) -> None:
        """This worker was told to stop. No news where all stop, or end, anyway."""
        if self._begin_to_stop():
            self._tell(Stopping(self._config.dp_rank))

    def expect_end(self) -> None:
        """From now on the end of another is none of ours."""
        with self._lock:
            self._is_over = True

    def close(self) -> None:
        """Idempotent."""
        self.expect_end()
        for connection in self._connections.values():
            connection.close()

    def _gather(self, store_port: int, deadline: float) -> None:
        listener = PeerListener(self.settings, self._config)
        missing: list[str] = []
        try:
            for rank in range(1, self._config.dp_size):
                try:
                    self._connections[rank] = listener.wait_for(rank, max(0.0, deadline - time.monotonic()))
                except TimeoutError:  # those after it are told, too, where they have joined
                    missing.append(str(rank))
        finally:
            listener.close()
        if missing:
            reason = f"data-parallel ranks that have not joined in time: {', '.join(missing)}"
            self._tell(Refused(reason))
            raise ExecutorTimeoutError(reason)
        self.group = secrets.token_hex(8)
        self._tell(Met(store_port, self.group))

    def _join(self, deadline: float) -> int:
        connection = self._connect(deadline)
        try:
            met = self._introduce(connection)
        except ExecutorError:
            connection.close()
            raise
        self._connections[0] = connection
        self.group = met.group
        return met.store_port

    def _introduce(self, connection: TcpConnection) -> Met:
        config = self._config
        try:
            send(connection, JoinPeers(config.dp_rank, package_version(), traits_of(config)))
            answer: Met | Refused = receive(connection)
        except (EOFError, OSError) as error:
            raise ExecutorDiedError("data-parallel rank 0 ended before all others had joined") from error
        if isinstance(answer, Refused):
            host = self.settings.host
            raise ExecutorStartError(f"data-parallel rank 0 at {host} refuses this worker: {answer.reason}")
        return answer

    def _connect(self, deadline: float) -> TcpConnection:
        """Tries again while nobody listens."""
        settings = self.settings
        where = f"{settings.host}:{settings.port}"
        has_said = False
        logger.info("joining data-parallel rank 0 at %s", where)
        while True:
            try:
                return connect(settings.host, settings.port, settings.secret)
            except HandshakeError as error:
                raise ExecutorStartError(str(error)) from error
            except (EOFError, OSError):
                left = deadline - time.monotonic()
                if left < PAUSE_SECONDS:
                    reason = f"data-parallel rank 0 did not wait for others in time, at {where}"
                    raise ExecutorTimeoutError(reason) from None
                if not has_said:
                    has_said = True
                    logger.info("data-parallel rank 0 does not wait for others at %s; trying for %.0f s", where, left)
                time.sleep(PAUSE_SECONDS)

    def _listen(self, rank: int, connection: TcpConnection) -> None:
        try:
            while True:
                message: Lost | Stopping = receive(connection)
                self._tell(message, but=rank)
                if isinstance(message, Lost):
                    self._lose(f"data-parallel rank {message.rank} is lost: {message.reason}")
                elif self._begin_to_stop():
                    logger.info("data-parallel rank %d stops, so this worker stops, too", message.rank)
                    self._on_stop()
        except (EOFError, OSError):
            self._lose(f"data-parallel rank {rank} is gone")

    def _begin_to_stop(self) -> bool:
        """Whether nobody has said yet that this is the end."""
        with self._lock:
            was_ending = self._is_stopping or self._is_over
            self._is_stopping = True
        return not was_ending

    def _lose(self, reason: str) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            self._on_lost(reason)

    def _tell(self, message: Met | Refused | Lost | Stopping, but: int | None = None) -> None:
        """All we are connected to, but one. Who is gone is noticed by who listens to it."""
        data = encode(message)
        with self._lock:
            for rank, connection in self._connections.items():
                if rank != but:
                    try:
                        connection.send_bytes(data)
                    except OSError:
                        logger.debug("data-parallel rank %d is gone", rank)


def traits_of(config: RunnerConfig) -> dict[str, Any]:
    """What must be the same on all workers: the experts are of one model, and steps are of one size. Raises
    ExecutorStartError."""
    try:
        fingerprint = model_fingerprint(resolve_model(config.model), is_dummy=config.load_format == "dummy")
    except ModelError as error:
        raise ExecutorStartError(str(error)) from error
    shared = {name: value for name, value in asdict(config).items() if name not in OWN_AFFAIRS}
    return shared | {"model fingerprint": fingerprint}
