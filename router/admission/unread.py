"""Bytes of an answer that its client has not read yet."""

from fissile.errors import ResourceExhaustedError
from router.admission.budget import Budget

STEP = 64 * 1024
"""They are taken from the budget by so many, and the first ones not at all: most answers never wait."""


class UnreadBytes:
    """Of one request; by estimate. What a client takes is on its way until it takes more, and counts until then."""

    def __init__(self, budget: Budget, client: str, limit: int) -> None:
        """`limit`: of this request; `budget`: of all."""
        self._budget = budget
        self._client = client
        self._limit = limit
        self._num_waiting = 0
        self._num_on_way = 0
        self._num_granted = 0

    def add(self, num_bytes: int) -> None:
        """Raises ResourceExhaustedError where that is too much."""
        self._num_waiting += num_bytes
        num_bytes = self._num_waiting + self._num_on_way
        if num_bytes < self._num_granted + STEP:
            return
        if num_bytes > self._limit:
            raise ResourceExhaustedError(
                f"{num_bytes} bytes of the answer wait to be read, and {self._limit} may (max-unread-bytes)"
            )
        wanted = num_bytes // STEP * STEP - self._num_granted
        self._budget.take(self._client, wanted)
        self._num_granted += wanted

    def taken(self, num_left: int) -> None:
        """By the client: all but `num_left` bytes."""
        self._num_on_way, self._num_waiting = self._num_waiting - num_left, num_left
        self._shrink(self._num_on_way + num_left)

    def release(self) -> None:
        """Nobody will read. Idempotent."""
        self._num_on_way = self._num_waiting = 0
        self._shrink(0)

    def _shrink(self, num_bytes: int) -> None:
        excess = self._num_granted - num_bytes // STEP * STEP
        if excess > 0:
            self._num_granted -= excess
            self._budget.give(self._client, excess)
