"""Who comes in: blocks for new sequences, forks, and those that were preempted."""

import enum

from worker.core.block_chain import Anchor
from worker.core.scheduling.batch_builder import BatchBuilder
from worker.core.scheduling.preemption import belongs_to_senior
from worker.core.scheduling.room import Room
from worker.core.scheduling.state import SchedulerState
from worker.core.sequence import Sequence, SequenceStatus

GROWTH_STEPS = 16
"""Decoding steps that a sequence must have room for, with all that run, when it comes back after its first preemption.

Twice as many after each further one: who runs for 16, 32, 64 … steps in between is preempted a few times only, however
long it gets.
"""
MAX_SPARE_SHARE = 4
"""At most a quarter of the pool is kept free for that: more would cost more throughput than preemptions do."""


class Entrance(enum.Enum):
    """What became of the queue's head."""

    ADMITTED = enum.auto()
    FOLLOWS = enum.auto()
    """It left the queue until another sequence has computed what they share."""
    WAITS = enum.auto()
    """Nothing has changed."""


class Admission:
    """Blocks for sequences that come in: new ones, forks, and those that were preempted."""

    def __init__(self, state: SchedulerState, room: Room, num_watermark_blocks: int) -> None:
        self._state = state
        self._config = state.config
        self._blocks = state.blocks
        self._room = room
        self._num_watermark_blocks = num_watermark_blocks

    def chunk(self, num_remaining: int, builder: BatchBuilder) -> int:
        """Tokens of one sequence in one step, of `num_remaining`."""
        num_tokens = min(num_remaining, builder.budget)
        if self._config.max_prefill_chunk:
            num_tokens = min(num_tokens, self._config.max_prefill_chunk)
        return num_tokens

    def admit(self, seq: Sequence, builder: BatchBuilder) -> Entrance:
        """Binds blocks to a waiting sequence, for what it will run in this step at least, or has it step aside."""
        state = self._state
        if len(state.holdings.free_slots) < state.num_slots_needed(seq):
            return Entrance.WAITS
        if seq.parent_id is not None and self._try_fork(seq, builder):
            return Entrance.ADMITTED
        hits, anchor = self._blocks.match(seq)
        hashes = self._blocks.hashes(seq, len(hits))
        if not seq.needs_whole_prompt:
            # One token is left to compute: a block that ends with the last one is not taken over.
            num_shareable = (seq.num_tokens - 1) // self._blocks.block_size - len(hits)
            if state.leaders.follow(seq, len(hits), hashes[:num_shareable]):
                state.waiting.discard(seq.id)
                self._blocks.ask_checkpoint(*state.leaders.awaited(seq))
                return Entrance.FOLLOWS
        num_found = len(hits)
        hits, anchor = self._blocks.resumable(seq, hits, anchor)
        if not self._try_allocate(seq, hits, anchor, builder):
            return Entrance.WAITS
        self._blocks.plan_checkpoints(seq, num_found)
        state.leaders.lead(seq, num_found, hashes)
        return Entrance.ADMITTED

    def try_swap_in(self, seq: Sequence, builder: BatchBuilder) -> bool:
        """Binds blocks to a swapped sequence and has its content brought back; False changes nothing."""
        num_blocks = self._blocks.num_blocks_for(seq.num_tokens)
        if not self._state.holdings.free_slots or not self._blocks.can_allocate(
            [], num_blocks, self._num_spare_blocks(seq)
        ):
            return False
        host_blocks = list(seq.host_block_table)
        builder.swap_in += self._blocks.swap_in(seq, num_blocks)
        builder.given_host_blocks += host_blocks
        return True

    def _try_fork(self, seq: Sequence, builder: BatchBuilder) -> bool:
        """A member of an n > 1 group takes over the computed prompt, all but its last token, which it runs itself.

        So it samples its first token like any other sequence, with its own seed.
        """
        parent = self._state.sequences.get(seq.parent_id) if seq.parent_id is not None else None
        num_computed = seq.num_prompt_tokens - 1
        if (
            parent is None
            or parent.status is not SequenceStatus.RUNNING
            or parent.num_computed_tokens < seq.num_prompt_tokens
            or parent.num_preemptions  # it may be computing the prompt again in this very step
            or seq.num_generated_tokens
            or num_computed == 0
            or self._blocks.groups
            or not self._blocks.can_allocate([], 1, self._num_spare_blocks(seq))
        ):
            return False
        self._blocks.fork(parent, seq, seq.num_prompt_tokens)
        seq.num_computed_tokens = num_computed
        self._room.copy_on_write(seq, num_computed // self._blocks.block_size, builder)
        return True

    def _try_allocate(self, seq: Sequence, hits: list[int], anchor: Anchor | None, builder: BatchBuilder) -> bool:
        num_committed = seq.num_tokens
        num_cached = len(hits) * self._blocks.block_size
        num_remaining = num_committed - num_cached
        num_tokens = self.chunk(num_remaining, builder)
        can_chunk = self._config.can_chunk
        if not can_chunk and num_tokens < num_remaining and num_remaining <= self._config.max_num_batched_tokens:
            return False  # whole prompts only, save for what outgrew the budget
        is_first_chunk = can_chunk and not seq.num_preemptions
        num_blocks = self._blocks.num_blocks_for(num_cached + num_tokens if is_first_chunk else num_committed)
        if not self._blocks.can_allocate(hits, num_blocks, self._num_spare_blocks(seq)):
            return False
        self._blocks.allocate(seq, hits, anchor, num_blocks)
        return True

    def _num_spare_blocks(self, seq: Sequence) -> int:
        """Blocks that must stay free when `seq` comes in beside others, so that it is not soon thrown out again."""
        state = self._state
        senior = state.seniority.peek()
        if senior is None or seq.order < senior[0] or belongs_to_senior(seq, senior[1]):
            return 0  # it will not be thrown out
        num_spare = self._num_watermark_blocks + state.groups.num_parked_of(seq)
        if seq.num_preemptions:
            num_steps = GROWTH_STEPS << (seq.num_preemptions - 1)
            num_growing = self._blocks.num_blocks_for((state.num_running + 1) * num_steps)
            num_spare += min(num_growing, self._blocks.pool.num_blocks // MAX_SPARE_SHARE)
        return num_spare
