"""Tool calls of an answer that the client has not seen yet."""

import uuid
from dataclasses import dataclass

from fissile.v1 import ToolCallDelta
from router.formats.events import CallArguments, CallStart


@dataclass(slots=True)
class _Part:
    index: int
    id: str
    name: str
    arguments: list[str]


class PendingCalls:
    """Gives each call its id. Parts of the same call become one."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(self, event: CallStart | CallArguments) -> None:
        if isinstance(event, CallStart):
            self._parts.append(_Part(event.index, f"call_{uuid.uuid4().hex}", event.name, []))
            return
        if not self._parts:  # its beginning was taken
            self._parts.append(_Part(event.index, "", "", []))
        self._parts[-1].arguments.append(event.text)

    def take(self, *, cumulative: bool) -> list[ToolCallDelta]:
        """What is new, or with `cumulative` everything so far."""
        taken = []
        for part in self._parts:
            arguments = "".join(part.arguments)
            part.arguments = [arguments]
            taken.append(ToolCallDelta(index=part.index, id=part.id, name=part.name, arguments=arguments))
        if not cumulative:
            self._parts = []
        return taken
