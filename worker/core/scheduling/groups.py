"""Sequences of one prompt: whose members wait aside until the parent has computed it."""

from collections.abc import Iterator

from worker.core.sequence import Sequence


class Groups:
    """Parents and their children. A group is known from `park` until its last child has ended."""

    def __init__(self) -> None:
        self._num_children: dict[int, int] = {}
        """Parent's id → its unfinished children, be it unfinished itself or not."""
        self._parked: dict[int, dict[int, Sequence]] = {}
        """Parent's id → children that wait for the prompt, by id."""
        self.num_parked = 0

    def __contains__(self, sequence_id: int) -> bool:
        """Whether an unfinished child names this one as its parent."""
        return sequence_id in self._num_children

    def park(self, parent: Sequence, children: list[Sequence]) -> None:
        """Keeps the children out of the queue until the parent has computed the prompt."""
        if children:
            self._num_children[parent.id] = len(children)
            self._parked[parent.id] = {child.id: child for child in children}
            self.num_parked += len(children)

    def num_parked_of(self, parent: Sequence) -> int:
        """Children that wait for this one."""
        return len(self._parked.get(parent.id, ()))

    def parked(self) -> Iterator[Sequence]:
        """All that wait."""
        for children in self._parked.values():
            yield from children.values()

    def unpark(self, parent: Sequence) -> list[Sequence]:
        """The children that waited for this one: the prompt is computed, or will never be."""
        children = list(self._parked.pop(parent.id, {}).values())
        self.num_parked -= len(children)
        return children

    def discard(self, child: Sequence) -> None:
        """It waits for nobody any more."""
        if child.parent_id in self._parked and self._parked[child.parent_id].pop(child.id, None) is not None:
            self.num_parked -= 1

    def leave(self, child: Sequence) -> None:
        """It has ended."""
        if child.parent_id is not None:
            self._num_children[child.parent_id] -= 1
            if not self._num_children[child.parent_id]:
                del self._num_children[child.parent_id]
