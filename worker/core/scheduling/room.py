"""Room in the cache for those that run, by preemption where there is none."""

from worker.core.scheduling.batch_builder import BatchBuilder
from worker.core.scheduling.preemption import choose_victim
from worker.core.scheduling.state import SchedulerState
from worker.core.sequence import Sequence


class Room:
    """Blocks for running sequences, by preemption where there are none."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._blocks = state.blocks

    def provide(self, seq: Sequence, num_tokens: int, builder: BatchBuilder) -> bool:
        """Makes the table of `seq` long enough for `num_tokens` and its next block its own.

        False: there is no room in this step. Then `seq` may have been preempted itself, as the last of all.
        """
        blocks = self._blocks
        missing = max(blocks.num_blocks_for(num_tokens) - len(seq.block_table), 0)
        first = seq.num_computed_tokens // blocks.block_size
        # Only forks share what they write into, and of these only beams can be without room in the step of the fork.
        is_shared = seq.beam_group is not None and blocks.is_shared(seq, first, builder.pinned_blocks)
        num_needed = missing + is_shared
        if not blocks.pool.can_take(num_needed) and not self._find_blocks(seq, num_needed, builder):
            return False
        if is_shared:
            self.copy_on_write(seq, first, builder)
        if missing:
            new_blocks = blocks.grow(seq, missing)
            if seq.is_bound:
                builder.new_block_ids.append((seq.slot, new_blocks))
        return True

    def copy_on_write(self, seq: Sequence, index: int, builder: BatchBuilder) -> None:
        """Gives `seq` its own copy of a shared block of its table, in the step that is being built."""
        source, destination = self._blocks.make_writable(seq, index)
        builder.copies.append((source, destination))
        builder.pinned_blocks.append(source)

    def _find_blocks(self, seq: Sequence, num_needed: int, builder: BatchBuilder) -> bool:
        state = self._state
        while not self._blocks.pool.can_take(num_needed):
            builder.is_blocked = True
            if self._blocks.pool.num_free + state.holdings.num_deferred_blocks >= num_needed:
                return False  # enough comes free with the steps in flight
            running = list(state.running())
            victim = choose_victim(running, state.config.preemption_policy, builder.step)
            if victim is not None:
                state.preempt(victim)
            if victim is None or victim is seq:
                return False
        return True

    def break_stall(self) -> bool:
        """For a step that found nothing to do: if the queue's head waits for room, the last one behind it has to go.

        That happens when beams keep their blocks while a sibling waits to come back. False if there is nobody to move,
        or if steps in flight will change things anyway.
        """
        state = self._state
        head = min((head[0] for head in (state.swapped.peek(), state.waiting.peek()) if head is not None), default=None)
        if state.in_flight or head is None:
            return False
        victim = max(
            (seq for seq in state.running() if seq.order[:2] > head[:2]), key=lambda seq: seq.order, default=None
        )
        if victim is None:
            return False
        state.preempt(victim)
        return True
