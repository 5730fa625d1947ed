"""From a worker's KV events to its view. Numbers are checked: the view is what the worker has, or begins anew."""

from fissile.v1 import KvEvent, WatchKvEventsResponse
from router.fleet.prefixes.index import View


class KvGapError(Exception):
    """Events are missing, or they are of another process: subscribe again."""


class KvFeed:
    """Of one worker, over one subscription after the other; each begins with a snapshot."""

    def __init__(self, view: View, epoch: str) -> None:
        """`epoch`: of the worker that the view is of."""
        self._view = view
        self._epoch = epoch
        self._last_number: int | None = None
        """Of the last event that is in the view; None: the snapshot has not come."""

    def apply(self, response: WatchKvEventsResponse) -> None:
        """Raises KvGapError, and has then taken nothing of it."""
        number = response.sequence_number
        if response.epoch != self._epoch:
            raise KvGapError(f"events of epoch {response.epoch!r}, not {self._epoch!r}")
        if response.is_snapshot:
            self._last_number = number
        elif self._last_number is None or number != self._last_number + 1:
            raise KvGapError(f"event {number} after {self._last_number}")
        else:
            self._last_number += len(response.events)
        for event in response.events:
            self._apply(event)

    def restart(self) -> None:
        """The subscription is over: nothing is known until the next one's snapshot."""
        self._view.clear()
        self._last_number = None

    def _apply(self, event: KvEvent) -> None:
        match event.WhichOneof("event"):
            case "stored":
                self._view.store(event.stored.block_hashes)
            case "removed":
                self._view.remove(event.removed.block_hashes)
            case "cleared":
                self._view.clear()
