"""The executor's link to one rank: who hears what it says, and who sends."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from worker.executor.errors import ExecutorDiedError, ExecutorTimeoutError
from worker.executor.transport import RankTransport
from worker.processes.messages import encode
from worker.runner.messages import Pulse, Setup, Stop

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
SEND_SECONDS = 60.0
"""For a message that another thread sends to the same rank."""


class RankLink:
    """Its thread opens the transport, and lasts as long as the rank."""

    def __init__(
        self,
        setup: Setup,
        transport: RankTransport,
        on_message: Callable[[int, Any], None],
        on_end: Callable[[int], None],
    ) -> None:
        """Both are called from the link's thread, with the rank."""
        self._setup, self._transport = setup, transport
        self._on_message, self._on_end = on_message, on_end
        self._sending = threading.Lock()
        self._verdict: str | None = None
        """Why it was given up."""
        self.num_heard = 0
        """Messages of the rank."""
        self._thread = threading.Thread(target=self._serve, name=f"rank-{setup.rank}", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """From any thread. The rank drains what it is sent in a thread of its own, so this does not block for long,
        unless the rank hangs. Raises ExecutorDiedError or ExecutorTimeoutError."""
        if not self._sending.acquire(timeout=SEND_SECONDS):
            raise ExecutorTimeoutError(f"rank {self._setup.rank} does not read what it is sent")
        try:
            self._transport.send(message)
        except OSError:
            is_gone = True
        else:
            is_gone = False
        finally:
            self._sending.release()
        if is_gone:
            raise ExecutorDiedError(self.epitaph())

    def request_stop(self) -> None:
        """Gives up on a rank that is gone or hangs."""
        if not self._sending.acquire(timeout=STOP_SECONDS):
            return
        try:
            self._transport.send(encode(Stop()))
        except OSError:
            logger.debug("rank %d is gone already", self._setup.rank)
        finally:
            self._sending.release()

    def end(self, deadline: float) -> None:
        """Wait for the rank until `deadline`, then kill it. One that is past needs no word: nobody waits for what has
        failed."""
        wait = max(0.0, deadline - time.monotonic())
        self._thread.join(wait)
        if self._thread.is_alive():
            if wait:
                logger.warning("rank %d has not ended; killing it", self._setup.rank)
            self._transport.kill()
        self._thread.join()

    @property
    def is_stopped(self) -> bool:
        """Whether its process is, as far as can be seen from here."""
        return self._transport.is_stopped()

    def give_up(self, reason: str) -> None:
        """Kill the rank: who waits for it learns of its end."""
        self._verdict = f"rank {self._setup.rank} {reason}"
        logger.error("%s; killing it", self._verdict)
        self._transport.kill()

    def epitaph(self) -> str:
        """Why the rank is no more. Waits until that is known."""
        self._thread.join(STOP_SECONDS)
        return self._verdict or self._transport.epitaph()

    def _serve(self) -> None:
        """Have the rank there, and pass on what it says until it is over."""
        rank = self._setup.rank
        try:
            self._transport.open()
            self._transport.send(encode(self._setup))
            while True:
                message = self._transport.receive()
                self.num_heard += 1
                if not isinstance(message, Pulse):
                    self._on_message(rank, message)
        except (EOFError, OSError):
            self._transport.wait()
        finally:
            with self._sending:
                self._transport.close()
            self._on_end(rank)
