"""Refusals of the core. Each names the field, the value and the number that would have worked."""


class ConfigError(ValueError):
    """A configuration that cannot work. Raised at construction, before anything was allocated."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class InvalidSequenceError(ValueError):
    """A sequence that could never run. Raised by `Scheduler.add`; nothing of it was kept."""

    def __init__(self, field: str, value: int, limit: int, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit
        self.message = message


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; try again later. Nothing was kept."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        super().__init__(f"{num_waiting} sequences are waiting, the limit is {limit}")
        self.num_waiting = num_waiting
        self.limit = limit
