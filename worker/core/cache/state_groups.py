"""Groups of recurrent state: where a model has such, each sequence with blocks also holds one."""

from worker.core.sequence import Sequence


class StateGroups:
    """Those of sequences; with 0 of them nobody holds any. What is kept of states besides is in `Checkpoints`."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._free = list(range(num_groups - 1, -1, -1))

    def __bool__(self) -> bool:
        return self.num_groups > 0

    @property
    def num_used(self) -> int:
        return self.num_groups - len(self._free)

    @property
    def can_take(self) -> bool:
        return bool(self._free) or not self

    def take(self, seq: Sequence) -> None:
        """For a sequence that has none. The caller has asked `can_take`."""
        if self:
            seq.group_id = self._free.pop()

    def give(self, group_id: int) -> None:
        """Of a sequence that had one; -1: it had none."""
        if group_id >= 0:
            if group_id in self._free:
                raise RuntimeError(f"group {group_id} is freed twice")
            self._free.append(group_id)

    def hand_on(self, parents: list[Sequence], forks: list[tuple[Sequence, Sequence]]) -> list[tuple[int, int]]:
        """Gives the child of each (parent, child) a group: to a parent's first one its own, to others those of parents
        without a child, or free ones. There are enough: as many sequences as there are groups have slots, the beams of
        a search among them from its start on; a group that only a step under way uses had one when that was planned.

        Returns the (source, destination) of states to copy before any of them goes on; no source is a destination.
        """
        if not self:
            return []
        inherited = {parent.id: parent.group_id for parent, _ in forks}
        spare = [parent for parent in parents if parent.group_id >= 0 and parent.id not in inherited]
        copies = []
        for parent, child in forks:
            child.restored_group = child.group_id = parent.group_id
            parent.group_id = -1
            if child.group_id < 0:
                child.restored_group = child.group_id = self._take_from(spare)
                copies.append((inherited[parent.id], child.group_id))
        return copies

    def _take_from(self, spare: list[Sequence]) -> int:
        """Of one who needs it no longer, or a free one."""
        if not spare:
            return self._free.pop()
        owner = spare.pop()
        group_id, owner.group_id = owner.group_id, -1
        return group_id

    def check(self, num_held: int) -> None:
        """Raises `RuntimeError` if that is not how many are held."""
        if num_held + len(set(self._free)) != self.num_groups:
            raise RuntimeError(f"{num_held} groups held and {len(self._free)} free of {self.num_groups}")
