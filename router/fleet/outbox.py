"""Commands on their way to a worker: those that wait travel together."""

import asyncio
from collections.abc import Iterator

from common.field_count import MAX_FIELDS
from fissile.channel import MAX_MESSAGE_BYTES
from fissile.v1 import AbortSequence, ExecuteCommand, SequenceGroup

MAX_BATCH_BYTES = 2 * MAX_FIELDS
"""Commands that wait travel together up to this size. So many bytes have no more fields than a worker takes; a command
alone has fewer by the bounds of requests."""
MAX_BATCH_COMMANDS = 128
"""To make a message of so many takes less than a millisecond of the event loop."""
MAX_COMMAND_BYTES = MAX_MESSAGE_BYTES - 1024
"""What is left for one alone, with what stands around it in its message."""
ABORT_BYTES = 16
"""Of the longest one."""
GATHER_SECONDS = 0.005
"""A step is rarely shorter, so commands that wait so long for others are hardly carried out later."""


class Outbox:
    """Filled and emptied on one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[ExecuteCommand, int]] = []
        """With the bytes of each: to count them costs as much as to send them."""
        self._filled = asyncio.Event()
        self._num_waiting_bytes = 0
        self._num_taken_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of what waits, and of what was taken last and may be on its way still."""
        return self._num_waiting_bytes + self._num_taken_bytes

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, group: SequenceGroup, num_bytes: int) -> None:
        self._put(ExecuteCommand(group=group), num_bytes)

    def abort(self, sequence_id: int) -> None:
        self._put(ExecuteCommand(abort=AbortSequence(sequence_id=sequence_id)), ABORT_BYTES)

    def _put(self, command: ExecuteCommand, num_bytes: int) -> None:
        self._waiting.append((command, num_bytes))
        self._num_waiting_bytes += num_bytes
        self._filled.set()

    def clear(self) -> None:
        self._waiting.clear()
        self._num_waiting_bytes = self._num_taken_bytes = 0

    async def take(self, *, gathers: bool = False) -> Iterator[list[ExecuteCommand]]:
        """All that waits, and at least one, in batches. What was taken before has been written. `gathers`: what comes
        within GATHER_SECONDS is among it, as a message costs both ends several times what a small command does."""
        self._num_taken_bytes = 0
        if gathers:
            await asyncio.sleep(GATHER_SECONDS)
        await self._filled.wait()
        self._filled.clear()
        waiting, self._waiting = self._waiting, []
        self._num_taken_bytes, self._num_waiting_bytes = self._num_waiting_bytes, 0
        return batches(waiting)


def batches(commands: list[tuple[ExecuteCommand, int]]) -> Iterator[list[ExecuteCommand]]:
    """Join commands up to the limits; one above that of size goes alone."""
    batch: list[ExecuteCommand] = []
    size = 0
    for command, num_bytes in commands:
        if len(batch) == MAX_BATCH_COMMANDS or (batch and size + num_bytes > MAX_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(command)
        size += num_bytes
    if batch:
        yield batch
