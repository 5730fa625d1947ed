"""Where every sequence is, and what it holds: the queues, the slots, the endings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker.core.batch import ScheduledBatch
from worker.core.cache.block_manager import BlockManager
from worker.core.config import SchedulerConfig
from worker.core.outputs import Hypothesis, SequenceOutput
from worker.core.scheduling.groups import Groups
from worker.core.scheduling.lazy_heap import LazyHeap
from worker.core.scheduling.leaders import Leaders
from worker.core.sequence import BeamGroup, Sequence, SequenceStatus
from worker.core.stopping import ABORT_REASONS, FinishReason


@dataclass(slots=True)
class InFlightStep:
    """A step that was handed out and has not come back."""

    batch: ScheduledBatch
    rows: list[Sequence]
    has_prefill: bool


@dataclass(slots=True)
class DeferredFree:
    """What nobody holds any more but a step in flight."""

    last_step: int
    block_table: list[int]
    group_id: int


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    preemptions: int = 0
    swaps: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    draft_tokens: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    """Rows with drafts by how many of them were right."""

    @property
    def accepted_tokens(self) -> int:
        return sum(count * num_rows for count, num_rows in enumerate(self.accepted_counts))


class SchedulerState:
    """Owned by one scheduler; planner and committer work on it. Between any two calls it is whole: see `integrity`."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, clock: Callable[[], float]) -> None:
        self.config = config
        self.blocks = blocks
        self.clock = clock
        self.sequences: dict[int, Sequence] = {}
        """Every unfinished sequence that was added."""
        self.waiting: LazyHeap[tuple[int, int, int]] = LazyHeap()
        self.leaders = Leaders(blocks.block_size)
        """Who computes what others wait for, and these others."""
        self.groups = Groups()
        """Parents, and their children that wait for the prompt."""
        self.swapped: LazyHeap[tuple[int, int, int]] = LazyHeap()
        self.prefilling: dict[int, Sequence] = {}
        """Running, with committed tokens still to be scheduled. Insertion order is admission order."""
        self.decoding: dict[int, Sequence] = {}
        """Running, all but the newest token scheduled."""
        self.beams: dict[int, Sequence] = {}
        """Running members of beam searches, scheduled or waiting for their siblings."""
        self.seniority: LazyHeap[tuple[int, int, int]] = LazyHeap()
        """All that run, the senior first."""
        self.beam_groups: dict[int, BeamGroup] = {}
        """Root → its search."""
        self.deadlines: LazyHeap[float] = LazyHeap()
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.in_flight: list[InFlightStep] = []
        self.next_step = 0
        self.retired_step = -1
        self.outputs: list[SequenceOutput] = []
        self.has_urgent_outputs = False
        """Some of them are first tokens, endings, or large: whoever waits for these waits for nothing else."""
        num_drafts = config.num_speculative_tokens
        self.counters = Counters(accepted_counts=[0] * (num_drafts + 1) if num_drafts else [])
        self.last_prefill_seconds = 0.0
        self.swap_out: list[tuple[int, int]] = []
        """(device, host) copies that the next step starts with."""
        self.states_to_copy: dict[int, int] = {}
        """Checkpoint, or group of a forked beam → group that the last planned step leaves it in: the next one starts
        with these copies, in this order."""
        self.deferred: list[DeferredFree] = []

    def running(self) -> Iterable[Sequence]:
        """All running sequences that hold blocks."""
        yield from self.decoding.values()
        yield from self.beams.values()
        yield from self.prefilling.values()

    @property
    def has_decodes(self) -> bool:
        """Whether anything that runs beside prefills goes on; beams that wait for their siblings do not."""
        return bool(self.decoding) or any(seq.num_computed_tokens < seq.num_tokens for seq in self.beams.values())

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.beams)

    def num_slots_needed(self, seq: Sequence) -> int:
        """Free slots that must exist to admit `seq`: a group comes in only where all its members can follow."""
        if seq.beam_group is not None:
            return 0 if seq.beam_group.slots else seq.beam_group.search.params.width
        return 1 + self.groups.num_parked_of(seq)

    @property
    def num_waiting(self) -> int:
        """In the queue, or aside until another sequence has computed what they share."""
        return len(self.waiting) + self.groups.num_parked + self.leaders.num_followers

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that come free when steps in flight are retired (an upper bound: some may be shared)."""
        return sum(len(free.block_table) for free in self.deferred)

    def enqueue(self, seq: Sequence) -> None:
        """Puts a WAITING sequence in its place in the queue."""
        self.waiting.push(seq.order, seq)

    def start(self, seq: Sequence) -> None:
        """WAITING or SWAPPED → RUNNING; its blocks are bound already. The caller schedules it at once."""
        self._leave(seq)
        seq.move_to(SequenceStatus.RUNNING)
        self.seniority.push(seq.order, seq)
        group = seq.beam_group
        if group is None:
            seq.slot = self.free_slots.pop()
        else:
            if not group.slots:
                group.slots = [self.free_slots.pop() for _ in range(group.search.params.width)]
            seq.slot = group.slots[seq.order[2]]
        if seq.time_scheduled is None:
            seq.time_scheduled = self.clock()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)

    def place(self, seq: Sequence) -> None:
        """Files a running sequence by what is left to schedule for it."""
        if seq.beam_group is not None:
            self.beams[seq.id] = seq
        elif seq.num_computed_tokens + 1 == seq.num_known_tokens:
            self.prefilling.pop(seq.id, None)
            self.decoding[seq.id] = seq
        else:
            self.prefilling[seq.id] = seq

    def preempt(self, seq: Sequence) -> None:
        """RUNNING → SWAPPED if so configured and host memory has room, else → WAITING, at its old place.

        A token of it that is still in flight will be kept when it comes: it was computed before this. Never within the
        step that is being planned, once it has a row there: that would stay, and copies out come before copies in.
        """
        assert seq.last_step < self.next_step, f"sequence {seq.id} has a row in the step that is being planned"
        self._leave(seq)
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        swaps = (
            self.config.preemption_mode == "swap"
            and seq.beam_group is None
            and seq.num_computed_tokens > 0
            and self.blocks.can_swap_out(seq)
        )
        if swaps:
            self.swap_out += self.blocks.swap_out(seq)
            self.counters.swaps += 1
        self._free(seq)
        if swaps:
            seq.move_to(SequenceStatus.SWAPPED)
            self.swapped.push(seq.order, seq)
        else:
            seq.move_to(SequenceStatus.WAITING)
            seq.num_computed_tokens = 0
            self.enqueue(seq)
        if seq.beam_group is not None:
            self.release_idle_slots(seq.beam_group)

    def release_idle_slots(self, group: BeamGroup) -> None:
        """A search that waits as a whole holds no slots: whoever stands before it in the queue may need them."""
        if not any(member.status is SequenceStatus.RUNNING for member in group.members):
            self.free_slots += reversed(group.slots)
            group.slots = []

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        detail: str,
        new_token_ids: list[int],
        hypotheses: list[Hypothesis] | None = None,
    ) -> None:
        """Any state → FINISHED or ABORTED, with its one terminal output, which carries `new_token_ids`.

        These are committed already. Everything it holds is released.
        """
        if seq.beam_group is not None:
            self._end_beams(seq.beam_group)
        self._leave(seq)
        self._free(seq)
        if seq.host_block_table:
            self._free_host_blocks(seq)
        seq.move_to(SequenceStatus.ABORTED if reason in ABORT_REASONS else SequenceStatus.FINISHED)
        del self.sequences[seq.id]
        self.deadlines.discard(seq.id)
        self.requeue(self.groups.unpark(seq))
        self.groups.leave(seq)
        self.counters.finished += 1
        self.has_urgent_outputs = True
        self.outputs.append(
            SequenceOutput(
                sequence_id=seq.id,
                index=seq.index,
                token_offset=seq.num_generated_tokens - len(new_token_ids),
                token_ids=new_token_ids,
                finish_reason=reason,
                detail=detail,
                num_cached_tokens=seq.num_cached_tokens,
                timings=seq.timings,
                hypotheses=hypotheses,
            )
        )

    def adopt_beam(self, member: Sequence) -> None:
        """Files a beam that was forked from a running one and runs from the start, in its slot of the search."""
        assert member.beam_group is not None
        member.slot = member.beam_group.slots[member.order[2]]
        self.seniority.push(member.order, member)
        self.place(member)

    def drop_beam(self, member: Sequence) -> None:
        """Releases what a beam of a past round holds. The root lives on as the search's public face."""
        self._leave(member)
        self._free(member)
        if member.id not in self.sequences:
            member.move_to(SequenceStatus.FINISHED)

    def _end_beams(self, group: BeamGroup) -> None:
        for member in group.members:
            if member is not group.root:
                self.drop_beam(member)
        self.free_slots += reversed(group.slots)
        group.slots = []
        del self.beam_groups[group.root.id]

    def requeue(self, sequences: list[Sequence]) -> None:
        """Lets sequences that waited for another one into the queue, at their places."""
        for seq in sequences:
            self.enqueue(seq)

    def retire(self, step: int) -> None:
        """`step` is over on the device: what waited for it is free."""
        self.retired_step = step
        if self.deferred:
            due = [free for free in self.deferred if free.last_step <= step]
            self.deferred = [free for free in self.deferred if free.last_step > step]
            for free in due:
                self.blocks.give_back(free.block_table, free.group_id)

    def _free(self, seq: Sequence) -> None:
        """Releases slot, blocks and group; those that a step in flight may touch, when that step is retired."""
        if seq.slot >= 0 and seq.beam_group is None:
            self.free_slots.append(seq.slot)
        seq.slot = -1
        block_table, group_id = self.blocks.unbind(seq)
        if seq.last_step > self.retired_step:
            self.deferred.append(DeferredFree(seq.last_step, block_table, group_id))
        else:
            self.blocks.give_back(block_table, group_id)

    def _free_host_blocks(self, seq: Sequence) -> None:
        # A copy out that no step has taken up yet must not meet the next owner of its host block.
        unwanted = set(seq.host_block_table)
        self.swap_out = [pair for pair in self.swap_out if pair[1] not in unwanted]
        self.blocks.host_pool.give(reversed(seq.host_block_table))
        seq.host_block_table = []

    def _leave(self, seq: Sequence) -> None:
        """Takes `seq` out of the queue it is in."""
        if seq.status is SequenceStatus.RUNNING:
            self.seniority.discard(seq.id)
            for queue in (self.decoding, self.prefilling, self.beams):
                queue.pop(seq.id, None)
            self.requeue(self.leaders.dismiss(seq))
        elif seq.status is SequenceStatus.SWAPPED:
            self.swapped.discard(seq.id)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.discard(seq.id)
            self.leaders.discard(seq)
            self.groups.discard(seq)
