"""How the executor reaches a rank, wherever it runs."""

from typing import Any, Protocol


class RankTransport(Protocol):
    """Of one rank, for its life. The link's own thread calls `open`, then `receive` until it raises, then `wait` and
    `close`; any thread may call the others, `send` and `close` one at a time."""

    def open(self) -> None:
        """Have the rank there, ready for its `Setup`. Blocks. Raises OSError if it will not come."""

    def send(self, message: bytes) -> None:
        """Raises OSError when the rank is gone, or not there yet."""

    def receive(self) -> Any:
        """The rank's next message. Blocks. Raises EOFError or OSError when it is gone."""

    def wait(self) -> None:
        """Until the rank has ended, as far as can be seen from here."""

    def close(self) -> None:
        """Release what it was reached through."""

    def kill(self) -> None:
        """End the rank, without asking it. `open` and `receive` raise then, if they have not returned. Idempotent."""

    def is_stopped(self) -> bool:
        """Whether the system holds its process, as after SIGSTOP. False where that cannot be seen."""

    def epitaph(self) -> str:
        """Once it has ended: why the rank is no more, as far as can be seen from here."""
