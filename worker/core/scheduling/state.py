"""Where every sequence is: the queues, the ways between them, the endings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker.core.batch import ScheduledBatch
from worker.core.cache.block_manager import BlockManager
from worker.core.config import SchedulerConfig
from worker.core.outputs import Hypothesis, SequenceOutput
from worker.core.scheduling.groups import Groups
from worker.core.scheduling.holdings import Holdings
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
        self.holdings = Holdings(config.max_num_seqs, blocks)
        self.in_flight: list[InFlightStep] = []
        self.next_step = 0
        self.outputs: list[SequenceOutput] = []
        self.has_urgent_outputs = False
        """Some of them are first tokens, endings, or large: whoever waits for these waits for nothing else."""
        num_drafts = config.num_speculative_tokens
        self.counters = Counters(accepted_counts=[0] * (num_drafts + 1) if num_drafts else [])
        self.last_prefill_seconds = 0.0

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

    def enqueue(self, seq: Sequence) -> None:
        """Puts a WAITING sequence in its place in the queue."""
        self.waiting.push(seq.order, seq)

    def start(self, seq: Sequence) -> None:
        """WAITING or SWAPPED → RUNNING; its blocks are bound already. The caller schedules it at once."""
        self._leave(seq)
        seq.move_to(SequenceStatus.RUNNING)
        self.seniority.push(seq.order, seq)
        self.holdings.take_slot(seq)
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
            self.holdings.swap(seq)
            self.counters.swaps += 1
        self.holdings.free(seq)
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
            self.holdings.free_slots_of(group)

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
        self.holdings.free(seq)
        if seq.host_block_table:
            self.holdings.free_host_blocks(seq)
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
        self.holdings.take_slot(member)
        self.seniority.push(member.order, member)
        self.place(member)

    def drop_beam(self, member: Sequence) -> None:
        """Releases what a beam of a past round holds. The root lives on as the search's public face."""
        self._leave(member)
        self.holdings.free(member)
        if member.id not in self.sequences:
            member.move_to(SequenceStatus.FINISHED)

    def _end_beams(self, group: BeamGroup) -> None:
        for member in group.members:
            if member is not group.root:
                self.drop_beam(member)
        self.holdings.free_slots_of(group)
        del self.beam_groups[group.root.id]

    def requeue(self, sequences: list[Sequence]) -> None:
        """Lets sequences that waited for another one into the queue, at their places."""
        for seq in sequences:
            self.enqueue(seq)

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
