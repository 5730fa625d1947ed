"""Something there is only so much of, between all clients: places, bytes, connections.

By dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998):
a client may hold up to `SHARE` times what is free. So one that is alone gets four fifths, of two that want all each
gets four ninths, and there is always something left for one more. Nobody needs a limit of its own, and little lies idle
for clients that are not there.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from fissile.errors import ResourceExhaustedError

SHARE = 4
RETRY_AFTER_SECONDS = 1.0


class Budget:
    """Used on one event loop. A client that holds nothing is not known here."""

    def __init__(self, limit: int, what: str, setting: str) -> None:
        """`what` there is of it ("open requests"), and the `setting` that says how much, are for refusals."""
        self._limit = limit
        self._what = what
        self._setting = setting
        self._num_taken = 0
        self._held: dict[str, int] = {}

    @property
    def num_taken(self) -> int:
        return self._num_taken

    def held_by(self, client: str) -> int:
        return self._held.get(client, 0)

    def take(self, client: str, amount: int) -> None:
        """Raises ResourceExhaustedError, and takes nothing, where there is not enough, or where the client has its
        share: the first thing that a client takes need only be there."""
        free, held = self._limit - self._num_taken, self.held_by(client)
        if amount > free or (held and held + amount > SHARE * free):
            raise ResourceExhaustedError(
                f"{self._what}: {self._num_taken} of {self._limit} are taken, {held} of them by this client, and "
                f"{amount} more are wanted ({self._setting})",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self.force(client, amount)

    def force(self, client: str, amount: int) -> None:
        """Of what is there already and cannot be refused."""
        self._set(client, self.held_by(client) + amount)

    @contextmanager
    def forced(self, client: str, amount: int) -> Iterator[None]:
        """`force`, for as long as the block lasts."""
        self.force(client, amount)
        try:
            yield
        finally:
            self.give(client, amount)

    def give(self, client: str, amount: int) -> None:
        """Back, of what it holds."""
        self._set(client, self.held_by(client) - amount)

    def _set(self, client: str, held: int) -> None:
        self._num_taken += held - self.held_by(client)
        if held:
            self._held[client] = held
        else:
            self._held.pop(client, None)

    def taken(self, client: str, amount: int) -> AbstractContextManager[None]:
        """For as long as the block lasts. Raises as `take` does."""
        return _Taken(self, client, amount)


class _Taken(AbstractContextManager[None]):
    __slots__ = ("_amount", "_budget", "_client")

    def __init__(self, budget: Budget, client: str, amount: int) -> None:
        self._budget = budget
        self._client = client
        self._amount = amount

    def __enter__(self) -> None:
        self._budget.take(self._client, self._amount)

    def __exit__(self, *_: object) -> None:
        self._budget.give(self._client, self._amount)
