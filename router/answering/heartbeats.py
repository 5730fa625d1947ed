"""How long streams may be silent. A heartbeat costs what a message does and merges with nothing, so a client that asks
for many of them gets fewer."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

MAX_PER_SECOND = 100
"""Of all streams of a client together."""

Silence = Callable[[], float]
"""Seconds until a heartbeat is due, as of now."""


class Heartbeats:
    """Of one router."""

    def __init__(self) -> None:
        self._num_streams: Counter[str] = Counter()
        """That want some, by client."""

    def counted(self, client: str, wanted: float | None) -> AbstractContextManager[Silence | None]:
        """A stream of this client, for as long as the block lasts. `wanted`: seconds between two; None: none."""
        return nullcontext() if wanted is None else self._counted(client, wanted)

    @contextmanager
    def _counted(self, client: str, wanted: float) -> Iterator[Silence]:
        self._num_streams[client] += 1
        try:
            yield lambda: max(wanted, self._num_streams[client] / MAX_PER_SECOND)
        finally:
            self._num_streams[client] -= 1
            if not self._num_streams[client]:
                del self._num_streams[client]
