"""States of sequences after full blocks of theirs, kept for others that begin alike.

Where a model has recurrent state, cached blocks alone are not enough to go on from: the state after the last of them is
needed, too. A step that ends with a full block may leave a copy of it behind, in a group of the state pool; as many are
kept as there are such groups, those used last. A sequence leaves one at the last full block of its prompt, and where it
leaves what was cached before, or what another one waits for: there others will go their own ways, too.
"""

from collections import OrderedDict
from collections.abc import Iterable


class Checkpoints:
    """Block → group with the state after it. Valid while the block has its content; found through the prefix index,
    so never for a block that is not published.

    A state is copied at the start of the step after the one that it comes from: only from then on it can be used.
    """

    def __init__(self, groups: range) -> None:
        self._groups = groups
        self._free = list(reversed(groups))
        self._group_of: OrderedDict[int, int] = OrderedDict()
        """Least recently used first."""
        self._fresh: set[int] = set()
        """Blocks whose states the step that is being planned computes."""

    def begin_step(self) -> None:
        """A step is planned from here on."""
        self._fresh.clear()

    def num_usable(self, blocks: list[int]) -> int:
        """How many of these, from the first on, lead up to a state."""
        for num in range(len(blocks), 0, -1):
            if blocks[num - 1] in self._group_of and blocks[num - 1] not in self._fresh:
                return num
        return 0

    def use(self, block_id: int) -> int:
        """The group with the state after this block."""
        self._group_of.move_to_end(block_id)
        return self._group_of[block_id]

    def add(self, block_id: int) -> int | None:
        """A group for the state after this block, in place of the one that was used longest ago; None: there is one."""
        if block_id in self._group_of:
            return None
        group = self._free.pop() if self._free else self._group_of.popitem(last=False)[1]
        self._group_of[block_id] = group
        self._fresh.add(block_id)
        return group

    def drop(self, blocks: Iterable[int]) -> None:
        """These blocks have lost their content."""
        for block_id in blocks:
            group = self._group_of.pop(block_id, None)
            if group is not None:
                self._free.append(group)

    def check(self) -> None:
        """Raises `RuntimeError` if a group is lost or belongs to two."""
        if sorted([*self._free, *self._group_of.values()]) != list(self._groups):
            raise RuntimeError("checkpoints: a group is lost or belongs to two blocks")
