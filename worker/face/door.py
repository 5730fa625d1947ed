"""Whether a worker accepts anything new: open, drained (which can be taken back), or closed for good."""

import asyncio

from fissile.errors import FissileError, UnavailableError


class Door:
    """Open at first. Used on the event loop only."""

    def __init__(self) -> None:
        self._refusal: FissileError | None = None
        """Why nothing is accepted."""
        self._undrained: asyncio.Event | None = None
        """While it drains: set when that is taken back."""

    def check(self) -> None:
        """Raises UnavailableError, or what it was closed with, unless it is open."""
        if self._refusal is not None:
            raise self._refusal

    def close(self, reason: FissileError) -> None:
        """For good. Why it was closed before stands."""
        if self._refusal is None or self._undrained is not None:
            self._refusal = reason
        self._undrained = None

    def fail(self, reason: FissileError) -> None:
        """For good, whatever it was closed with before."""
        self._refusal, self._undrained = reason, None

    def drain(self) -> asyncio.Event:
        """Refuse from now on; the event is set when that is taken back. May be called again, and when it is closed."""
        if self._refusal is None:
            self._refusal = UnavailableError("the worker is draining")
            self._undrained = asyncio.Event()
        return self._undrained or asyncio.Event()

    def undrain(self) -> None:
        """Open again. Idempotent. Raises what it was closed with, if that is for good."""
        if self._undrained is not None:
            self._undrained.set()
            self._undrained = self._refusal = None
        self.check()
