"""The scheduler: queues of sequences in, steps out, tokens back in, outputs out. Plain Python, one thread."""

import time
from collections.abc import Callable, Iterator

from common.block_hash import BlockHasher, default_hasher
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.cache.block_manager import BlockManager
from worker.core.cache.kv_events import KvEvents
from worker.core.config import CacheConfig, SchedulerConfig, check_together
from worker.core.drafter import Drafter
from worker.core.errors import InvalidSequenceError, QueueFullError
from worker.core.outputs import LoadSnapshot, SequenceOutput
from worker.core.scheduling.beam_steps import BeamSteps
from worker.core.scheduling.committer import Committer
from worker.core.scheduling.feasibility import check_group, check_sequence, max_length_of
from worker.core.scheduling.integrity import integrity_slices
from worker.core.scheduling.planner import StepPlanner
from worker.core.scheduling.state import InFlightStep, SchedulerState
from worker.core.sequence import Sequence
from worker.core.slices import exhaust
from worker.core.stopping import FinishReason, find_stop


class Scheduler:
    """Puts the parts together: state, planner, committer. All methods must be called from one thread.

    The loop is `schedule()` → run → `postprocess()`. With `async_depth` 1 one more step may be scheduled before the
    earlier one is postprocessed. `take_outputs()` after either: schedule may end sequences, too (deadlines).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        hasher: BlockHasher = default_hasher,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter` is asked for what `config.num_speculative_tokens` allows, and needed if that is not 0. Raises
        `ConfigError` if the two configs cannot work together."""
        check_together(config, cache)
        if (drafter is not None) != (config.num_speculative_tokens > 0):
            raise ValueError(f"num_speculative_tokens is {config.num_speculative_tokens}, and the drafter {drafter}")
        self._config = config
        self._cache = cache
        self._blocks = BlockManager(cache, hasher)
        self._state = SchedulerState(config, self._blocks, clock)
        self._planner = StepPlanner(self._state, cache.num_blocks, drafter)
        self._beams = BeamSteps(self._state)
        self._committer = Committer(self._state, self._beams)
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        """Queues one sequence; the scheduler owns it from here.

        Raises `InvalidSequenceError` if it can never run, `QueueFullError` if the queue is full; then nothing is kept.
        """
        if sequence.parent_id is not None:
            raise InvalidSequenceError("parent_id", sequence.parent_id, 0, "members of a group come with it only")
        self._check([sequence])
        self._accept(sequence)
        if sequence.beam is not None:
            self._beams.start(sequence)
        self._state.enqueue(sequence)
        self._end_if_complete(sequence)

    def add_group(self, sequences: list[Sequence]) -> None:
        """Queues sequences of one prompt, all or none; the first is the parent, whose id the others name.

        The prompt is computed once, for the parent. When that is done, each other member takes over its blocks and
        computes the prompt's last token again, in a copy of that one block; one that brings tokens along finds the
        prompt in the prefix cache. From then on each is on its own. That they share the prompt is the caller's promise.
        Raises as `add`.
        """
        parent = sequences[0]
        check_group(sequences, self._config)
        self._check(sequences)
        for seq in sequences:
            self._accept(seq)
        self._state.groups.park(parent, sequences[1:])
        self._state.enqueue(parent)
        for seq in sequences:
            self._end_if_complete(seq)

    def abort(self, sequence_id: int, reason: FinishReason = FinishReason.ABORTED, detail: str = "") -> bool:
        """Ends one sequence in whatever state, with its terminal output; others of its group go on.

        Idempotent: False if there was nothing (left) to end. Its blocks are free at once, or when the step in flight
        that uses them is retired.
        """
        seq = self._state.sequences.get(sequence_id)
        if seq is None:
            return False
        self._state.end(seq, reason, detail, [])
        return True

    def schedule(self) -> ScheduledBatch | None:
        """The next step, to be run after those handed out before; None if there is nothing to run now."""
        state = self._state
        if len(state.in_flight) > self._config.async_depth:
            raise RuntimeError(f"{len(state.in_flight)} steps are in flight already")
        self._expire()
        holdings = state.holdings
        states, holdings.states_to_copy = holdings.states_to_copy, {}
        builder = self._planner.plan()
        if not builder.rows:
            holdings.states_to_copy = states
            return None
        swap_out, holdings.swap_out = holdings.swap_out, []
        copies = [(group, checkpoint) for checkpoint, group in states.items()]
        batch = builder.build(self._blocks.pool.take_blocks_to_zero(), swap_out, copies)
        # Only now, so that no copy of this step reads what another one has overwritten.
        self._blocks.pool.give(builder.pinned_blocks)
        self._blocks.host_pool.give(builder.given_host_blocks)
        state.in_flight.append(InFlightStep(batch, builder.rows, builder.has_prefill))
        state.next_step += 1
        state.counters.steps += 1
        state.counters.scheduled_tokens += batch.num_tokens
        return batch

    def postprocess(self, batch: ScheduledBatch, output: BatchOutput) -> None:
        """Takes in the result of the oldest step in flight. Raises `RuntimeError` if it is that of another."""
        oldest = self._state.in_flight[0] if self._state.in_flight else None
        if oldest is None or oldest.batch is not batch or output.step != batch.step:
            raise RuntimeError(f"step {batch.step} (output of {output.step}) is not the oldest in flight")
        del self._state.in_flight[0]
        self._committer.commit(oldest, output)

    @property
    def has_urgent_outputs(self) -> bool:
        """Whether first tokens or endings are among the news, which nobody should have to wait for."""
        return self._state.has_urgent_outputs

    def take_outputs(self) -> list[SequenceOutput]:
        """All news since the last call, in order; the list is the caller's."""
        outputs, self._state.outputs = self._state.outputs, []
        self._state.has_urgent_outputs = False
        return outputs

    def has_unfinished(self) -> bool:
        """Whether any sequence has not had its terminal output yet."""
        return bool(self._state.sequences)

    def next_wakeup(self) -> float | None:
        """When, on the clock, `schedule` should be called although nothing happened: a deadline or the delay factor."""
        deadline = self._state.deadlines.peek()
        times = [deadline[0] if deadline is not None else None, self._planner.delay_wakeup()]
        return min((at for at in times if at is not None), default=None)

    def clear_prefix_cache(self) -> int:
        """Forgets all cached prefixes that no sequence uses; returns the number of blocks."""
        return self._blocks.pool.clear_cached()

    def watch_kv_events(self, capacity: int = 65_536) -> KvEvents | None:
        """Starts recording what can be hit, if nobody did before; None if prefix caching is off.

        All observers share the one object, with the `capacity` of the first call, and read it in this thread.
        """
        return self._blocks.listen(capacity)

    def load(self) -> LoadSnapshot:
        """Load now and counters since start. Its cost does not grow with the queue."""
        state, pool, counters = self._state, self._blocks.pool, self._state.counters
        return LoadSnapshot(
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_swapped=len(state.swapped),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_blocks - pool.num_free,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_used_host_blocks=self._blocks.host_pool.num_blocks - self._blocks.host_pool.num_free,
            num_groups=self._blocks.groups.num_groups,
            num_used_groups=self._blocks.groups.num_used,
            num_waiting_tokens=state.waiting.num_tokens,
            num_prefix_queries=self._blocks.num_prefix_queries,
            num_prefix_hits=self._blocks.num_prefix_hits,
            num_preemptions=counters.preemptions,
            num_swaps=counters.swaps,
            num_evictions=self._blocks.index.num_evictions if self._blocks.index is not None else 0,
            num_steps=counters.steps,
            num_scheduled_tokens=counters.scheduled_tokens,
            num_generated_tokens=counters.generated_tokens,
            num_finished=counters.finished,
            num_draft_tokens=counters.draft_tokens,
            num_accepted_tokens=counters.accepted_tokens,
            accepted_counts=tuple(counters.accepted_counts),
        )

    def check_integrity(self) -> None:
        """Raises `RuntimeError` on any contradiction between queues, tables, pools and index."""
        exhaust(self.integrity_slices())

    def integrity_slices(self) -> Iterator[None]:
        """The same in slices of well below a millisecond, for who must not keep a request waiting.

        Give it up when anything changes, and start a new one.
        """
        return integrity_slices(self._state)

    def _check(self, sequences: list[Sequence]) -> None:
        state = self._state
        for seq in sequences:
            check_sequence(seq, self._config, self._cache)
            # A child finds its parent by id: that one must not be another's while it lives.
            if seq.id in state.sequences or seq.id in state.groups:
                raise InvalidSequenceError("id", seq.id, 0, f"a sequence with id {seq.id} is unfinished")
        limit = self._config.max_num_waiting
        if limit and state.num_waiting + len(sequences) > limit:
            raise QueueFullError(state.num_waiting, limit)

    def _accept(self, seq: Sequence) -> None:
        parent = self._state.sequences.get(seq.parent_id) if seq.parent_id is not None else None
        if parent is None:
            self._num_added += 1
        # Members of a group stand together in the queue, at the parent's place.
        arrival = parent.order[1] if parent is not None else self._num_added
        seq.order = (seq.priority if parent is None else parent.priority, arrival, seq.index)
        seq.max_length = max_length_of(seq, self._config, self._cache)
        seq.time_queued = self._state.clock()
        self._state.sequences[seq.id] = seq
        if seq.deadline is not None:
            self._state.deadlines.push(seq.deadline, seq)

    def _end_if_complete(self, seq: Sequence) -> None:
        """A resumed sequence may have been at its end already when its former worker was lost."""
        if not seq.num_resumed_tokens:
            return
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        resumed = seq.token_ids[seq.num_prompt_tokens :]
        kept, reason = find_stop(prompt, resumed, len(prompt), seq.stop, seq.max_length)
        if reason is not None:
            if reason is not FinishReason.MODEL_LENGTH:  # that worker may have had more room, and sent what came
                del seq.token_ids[len(prompt) + kept :]
            self._state.end(seq, reason, "", [])

    def _expire(self) -> None:
        """Ends every sequence whose deadline has passed, without running it."""
        deadlines = self._state.deadlines
        head = deadlines.peek()
        if head is None:
            return
        now = self._state.clock()
        while head is not None and head[0] <= now:
            self._state.end(head[1], FinishReason.DEADLINE, "the deadline passed", [])
            head = deadlines.peek()
