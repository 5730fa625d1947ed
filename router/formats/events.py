"""What a chat answer is made of. Events are not frozen: that would double the time to make one, for every token."""

from dataclasses import dataclass


@dataclass(slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Text the model thought with."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of the answer."""

    index: int
    name: str


@dataclass(slots=True)
class CallArguments:
    """More JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Output:
    """Collects events, and knows where the answer is."""

    __slots__ = ("events", "is_reasoning", "num_calls")

    def __init__(self, *, is_reasoning: bool = False) -> None:
        self.events: list[Event] = []
        self.is_reasoning = is_reasoning
        """What comes next belongs to the reasoning, as far as the text so far tells."""
        self.num_calls = 0

    def content(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))

    def start_call(self, name: str) -> None:
        self.events.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call started last."""
        if text:
            self.events.append(CallArguments(self.num_calls - 1, text))

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken
