"""What running sequences hold: slots, blocks, groups. Released at once, or when no step in flight may touch it."""

from dataclasses import dataclass

from worker.core.cache.block_manager import BlockManager
from worker.core.sequence import BeamGroup, Sequence


@dataclass(slots=True)
class DeferredFree:
    """What nobody holds any more but a step in flight."""

    last_step: int
    block_table: list[int]
    group_id: int


class Holdings:
    """Of all sequences; blocks are bound by the block manager. Knows of no queue."""

    def __init__(self, num_slots: int, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.retired_step = -1
        self.deferred: list[DeferredFree] = []
        self.swap_out: list[tuple[int, int]] = []
        """(device, host) copies that the next step starts with."""
        self.states_to_copy: dict[int, int] = {}
        """Checkpoint, or group of a forked beam → group that the last planned step leaves it in: the next one starts
        with these copies, in this order."""

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that come free when steps in flight are retired (an upper bound: some may be shared)."""
        return sum(len(free.block_table) for free in self.deferred)

    def take_slot(self, seq: Sequence) -> None:
        """Of a search, its first running member takes the slots of all."""
        group = seq.beam_group
        if group is None:
            seq.slot = self.free_slots.pop()
        else:
            if not group.slots:
                group.slots = [self.free_slots.pop() for _ in range(group.search.params.width)]
            seq.slot = group.slots[seq.order[2]]

    def free_slots_of(self, group: BeamGroup) -> None:
        """None of its members runs."""
        self.free_slots += reversed(group.slots)
        group.slots = []

    def free(self, seq: Sequence) -> None:
        """Releases slot, blocks and group; those that a step in flight may touch, when that step is retired."""
        if seq.slot >= 0 and seq.beam_group is None:
            self.free_slots.append(seq.slot)
        seq.slot = -1
        block_table, group_id = self._blocks.unbind(seq)
        if seq.last_step > self.retired_step:
            self.deferred.append(DeferredFree(seq.last_step, block_table, group_id))
        else:
            self._blocks.give_back(block_table, group_id)

    def swap(self, seq: Sequence) -> None:
        """What it has computed goes to the host with the next step; `free` is what follows."""
        self.swap_out += self._blocks.swap_out(seq)

    def free_host_blocks(self, seq: Sequence) -> None:
        # A copy out that no step has taken up yet must not meet the next owner of its host block.
        unwanted = set(seq.host_block_table)
        self.swap_out = [pair for pair in self.swap_out if pair[1] not in unwanted]
        self._blocks.host_pool.give(reversed(seq.host_block_table))
        seq.host_block_table = []

    def retire(self, step: int) -> None:
        """`step` is over on the device: what waited for it is free."""
        self.retired_step = step
        if self.deferred:
            due = [free for free in self.deferred if free.last_step <= step]
            self.deferred = [free for free in self.deferred if free.last_step > step]
            for free in due:
                self._blocks.give_back(free.block_table, free.group_id)
