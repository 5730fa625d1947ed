"""How busy one worker is, as far as this router can know."""

from dataclasses import dataclass

from fissile.v1 import WorkerLoad


@dataclass(slots=True)
class LoadTracker:
    """Own open sequences, counted before they are sent, plus what the worker's last report says others put on it.

    A report counts everyone's sequences; what was ours at that moment is taken off, so that each router of several sees
    the others' work once and its own exactly.
    """

    num_open: int = 0
    """Sequences of this router that are on the worker or on their way to it."""
    last_report: WorkerLoad | None = None
    _num_others: int = 0

    def opened(self) -> None:
        self.num_open += 1

    def closed(self) -> None:
        self.num_open -= 1

    def reported(self, load: WorkerLoad) -> None:
        self.last_report = load
        self._num_others = max(0, load.num_running + load.num_waiting + load.num_swapped - self.num_open)

    def reset(self) -> None:
        """The worker is gone, and everything on it."""
        self.num_open = 0
        self.last_report = None
        self._num_others = 0

    @property
    def num_sequences(self) -> int:
        """Estimate of all sequences on the worker."""
        return self.num_open + self._num_others
