"""The executor: one process per tensor-parallel rank, each with a model runner on its device.

Batches are broadcast to all ranks, rank 0 answers. Every wait has a timeout, and the end of any rank is noticed at
once, because what it is reached through breaks. One that stands still is ended (`watch.py`).
This process imports no torch. Nothing has a fixed name or port, unless ranks of other hosts are to find it: two
executors on one host do not see each other.
"""

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from worker.core.batch import BatchOutput, ScheduledBatch
from worker.executor.errors import ExecutorDiedError, ExecutorError, ExecutorStartError, ExecutorTimeoutError
from worker.executor.link import STOP_SECONDS, RankLink
from worker.executor.local import LocalRanks
from worker.executor.peers import Peers, PeerSettings
from worker.executor.profiles import Profiles
from worker.executor.rank_grammars import RankGrammars
from worker.executor.remote import RankListener, RemoteRank, RemoteRanks
from worker.executor.transport import RankTransport
from worker.executor.watch import RankWatch
from worker.grammars.checks import GrammarChecks
from worker.processes.messages import encode
from worker.runner.config import ModelInfo, RunnerConfig
from worker.runner.messages import Compiled, Failed, ProfileDone, Ready, Setup


class Executor:
    """`start`, then any number of `submit` and `collect`, then `shutdown`. One thread at a time may call these;
    `grammars` and `profiles` may be used from any, once it has started."""

    def __init__(
        self,
        config: RunnerConfig,
        *,
        local: LocalRanks | None = None,
        remote: RemoteRanks | None = None,
        peers: PeerSettings | None = None,
        log_level: str = "info",
        log_format: str = "text",
        on_rank_end: Callable[[], None] = lambda: None,
        on_peer_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`local`: the ranks of this host, where they were made for the same config, and run already. `remote`: ranks
        that others start; without it all are processes of this one. `peers`: how the workers meet whose ranks step
        together, if there are others.

        Called from other threads: `on_rank_end` whenever a rank, or another worker, has ended (`check` says whether
        that is bad), `on_peer_stop` when another worker was told to stop: this one must, too.
        """
        self._config, self._local, self._remote, self._peer_settings = config, local, remote, peers
        self._peers = None if peers is None else Peers(peers, config, self._on_peer_lost, on_peer_stop)
        self._on_rank_end = on_rank_end
        self._log = (log_level, log_format)
        self._ranks: list[RankLink] = []
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        """(rank, what it said); None when it is over; why it cannot go on, when another worker cannot."""
        self._in_flight: deque[int] = deque()
        self._has_failed = False
        self._watch: RankWatch | None = None
        self.profiles = Profiles()
        self.grammars = RankGrammars()

    def start(self, timeout: float = 600.0) -> ModelInfo:
        """Start the ranks, wait for those that others start, and until all can run steps; rank 0's report.

        Raises ExecutorStartError, ExecutorDiedError or ExecutorTimeoutError; the ranks are gone then.
        """
        deadline = time.monotonic() + timeout
        local = self._local or LocalRanks(self._config, self._remote, self._peer_settings)
        with local.store:
            try:
                port = local.store.getsockname()[1]
                host = None
                if self._peers is not None:
                    port, host = self._peers.meet(port, deadline), self._peers.settings.host
                for rank, transport in enumerate(self._transports(local)):
                    setup = Setup(self._config, rank, port, *self._log, host)
                    self._ranks.append(RankLink(setup, transport, self._on_message, self._on_end))
                info = self._wait_until_ready(deadline)
            except ExecutorError:
                self.shutdown()
                raise
        self._watch = RankWatch(tuple(self._ranks))
        self._watch.start()
        self.profiles.attach(tuple(self._ranks))
        model = info.config
        checks = GrammarChecks(self._config.model, model.vocab_size, model.eos_token_ids)
        self.grammars.attach(self._ranks[0], checks)
        return info

    @property
    def lockstep_group(self) -> str:
        """Of the workers whose ranks step together with ours, once it has started; empty: there are none."""
        return self._peers.group if self._peers is not None else ""

    def _on_message(self, rank: int, message: Any) -> None:
        if isinstance(message, Compiled):
            self.grammars.settle(message)
        elif isinstance(message, ProfileDone):
            self.profiles.settle(rank, message)
        else:
            self._inbox.put((rank, message))

    def _on_end(self, rank: int) -> None:
        self.grammars.fail(ExecutorDiedError(f"rank {rank} has ended"))
        self.profiles.fail()
        self._inbox.put((rank, None))
        self._on_rank_end()

    def _on_peer_lost(self, reason: str) -> None:
        self._inbox.put((self._config.dp_rank, reason))
        self._on_rank_end()

    @property
    def _stop_seconds(self) -> float:
        """Ranks that step together end together, once all workers have finished what they run."""
        return STOP_SECONDS + (self._peers.settings.stop_seconds if self._peers is not None else 0)

    def _wait_until_ready(self, deadline: float) -> ModelInfo:
        ready: dict[int, ModelInfo] = {}
        while len(ready) < len(self._ranks):
            rank, message = self._next(deadline, "start")
            ready[rank] = message.info
        return ready[0]

    def _transports(self, local: LocalRanks) -> list[RankTransport]:
        """In the order of the ranks. Raises ExecutorStartError."""
        size, transports = self._config.tensor_parallel_size, list[RankTransport](local.ranks)
        if self._remote is not None:
            listener = RankListener(self._remote, size)
            transports += [RemoteRank(rank, listener) for rank in range(len(transports), size)]
        return transports

    @property
    def _num_local_ranks(self) -> int:
        return self._config.tensor_parallel_size - (self._remote.count if self._remote is not None else 0)

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue a step on all ranks; does not wait for earlier ones. Raises ExecutorDiedError."""
        message = encode(batch)
        try:
            for rank in self._ranks:
                rank.send(message)
        except ExecutorError as error:
            self._fail(error)
            raise
        self._in_flight.append(batch.step)

    def collect(self, timeout: float) -> BatchOutput:
        """The result of the oldest step not collected yet; waits for it.

        Raises ExecutorDiedError or ExecutorTimeoutError.
        """
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        _, message = self._next(time.monotonic() + timeout, f"answer step {self._in_flight[0]}")
        assert isinstance(message, BatchOutput)
        expected = self._in_flight.popleft()
        if message.step != expected:
            raise ExecutorDiedError(f"rank 0 answered step {message.step} in place of step {expected}")
        return message

    def check(self) -> None:
        """Raises ExecutorDiedError if a rank ended while no step was in flight. Does not wait."""
        if not self._in_flight and not self._inbox.empty():
            self._next(time.monotonic(), "live")

    def announce_stop(self) -> None:
        """`shutdown` will come: the workers whose ranks step together with ours end what they run, too."""
        if self._peers is not None:
            self._peers.tell_stopping()

    def shutdown(self) -> None:
        """End all ranks: politely, then by force. Idempotent; never raises because a rank is gone already.

        After a failure by force alone: the others may hang in a collective with the one that is gone.
        """
        self.grammars.fail(ExecutorError("the executor was shut down"))
        self.grammars.shutdown()
        if self._watch is not None:
            self._watch.stop()
        if self._peers is not None:
            self._peers.expect_end()
        for rank in self._ranks if not self._has_failed else ():
            rank.request_stop()
        deadline = time.monotonic() + (0 if self._has_failed else self._stop_seconds)
        for rank in self._ranks:
            rank.end(deadline)
        if self._peers is not None:
            self._peers.close()
        self._ranks.clear()
        self._in_flight.clear()

    def _next(self, deadline: float, what: str) -> tuple[int, Any]:
        """The next `Ready` or `BatchOutput`; anything else is the end, for the other ranks, too."""
        try:
            return self._take(deadline, what)
        except ExecutorError as error:
            self._fail(error)
            raise

    def _fail(self, error: ExecutorError) -> None:
        self._has_failed = True
        if self._peers is not None:
            self._peers.tell_lost(str(error).splitlines()[0])

    def _take(self, deadline: float, what: str) -> tuple[int, Any]:
        try:
            rank, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ExecutorTimeoutError(f"the ranks did not {what} in time") from None
        if isinstance(message, str):
            raise ExecutorDiedError(message)
        if isinstance(message, Failed) and message.expected:
            where = "" if rank < self._num_local_ranks else f"rank {rank}, on its host: "
            raise ExecutorStartError(where + message.message)
        if isinstance(message, Failed):
            raise ExecutorDiedError(f"rank {rank}: {message.message}")
        if message is None:
            raise ExecutorDiedError(self._ranks[rank].epitaph())
        assert isinstance(message, Ready | BatchOutput)
        return rank, message
