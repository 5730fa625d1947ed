"""Plans one step: which sequence gets how many tokens, and whose blocks make room."""

from worker.core.batch import DEFERRED_TOKEN
from worker.core.drafter import Drafter
from worker.core.scheduling.admission import Admission, Entrance
from worker.core.scheduling.batch_builder import BatchBuilder
from worker.core.scheduling.drafts import DraftedDecodes
from worker.core.scheduling.room import Room
from worker.core.scheduling.state import SchedulerState
from worker.core.sequence import Sequence


class StepPlanner:
    """Hands out the tokens of one step from one budget.

    A sequence has `num_known_tokens`, and `num_computed_tokens` whose KV is in the cache; a step lets the second catch
    up with the first. Decode (one token behind), prefill, a chunk of it, a prompt with cached prefix and the return
    after a preemption are all this case, so a row is only ever (sequence, number of tokens); drafts are tokens behind
    the known ones, see `DraftedDecodes`. What differs is who goes first: `prefill_first` looks for prefills and lets
    decodes have the steps without any, `chunked` serves decodes and fills the rest of the budget with chunks.
    """

    def __init__(self, state: SchedulerState, num_blocks: int, drafter: Drafter | None = None) -> None:
        self._state = state
        self._config = state.config
        self._room = Room(state)
        self._drafted = DraftedDecodes(state, self._room, drafter) if drafter is not None else None
        self._admission = Admission(state, self._room, int(state.config.watermark * num_blocks))
        self._num_prefill_steps = 0
        """Prefill steps in a row while sequences decode."""

    def plan(self) -> BatchBuilder:
        """The next step, maybe without rows. Sequences may have been preempted for it."""
        builder = BatchBuilder(self._state.next_step, self._config.max_num_batched_tokens)
        counters = self._state.counters
        if self._state.blocks.checkpoints is not None:
            self._state.blocks.checkpoints.begin_step()
        while True:
            num_preemptions = counters.preemptions
            builder.is_blocked = False
            self._fill(builder)
            # Without rows, but somebody gave way: what is free now may be enough for others.
            if builder.rows or (counters.preemptions == num_preemptions and not self._room.break_stall()):
                return builder

    def _fill(self, builder: BatchBuilder) -> None:
        if self._config.scheduling_policy == "chunked":
            self._schedule_decodes(builder)
            self._schedule_prefills(builder)
            return
        state = self._state
        has_decodes = bool(state.decoding or state.beams or state.swapped)
        if not has_decodes or self._num_prefill_steps < self._config.decode_quota:
            self._schedule_prefills(builder)
        if builder.rows:
            self._num_prefill_steps = self._num_prefill_steps + 1 if has_decodes else 0
            return
        self._num_prefill_steps = 0
        self._schedule_decodes(builder)
        if not builder.rows and has_decodes:
            # The quota was for decodes that turn out to have nothing to do.
            self._schedule_prefills(builder)

    def _schedule_decodes(self, builder: BatchBuilder) -> None:
        """Every decoding sequence that is not at its limit, those that come back, and beams."""
        if self._drafted is None:
            self._schedule_single_tokens(builder)
        else:
            self._drafted.schedule(builder)
        if self._state.swapped and not builder.is_blocked:
            self._swap_in(builder)
        if self._state.beams:
            for seq in list(self._state.beams.values()):
                self._schedule_prefill(seq, builder)

    def _schedule_single_tokens(self, builder: BatchBuilder) -> None:
        """One token for each. The hot loop: no calls in the common case."""
        step = builder.step
        rows_append = builder.rows.append
        slots_append = builder.slots.append
        computed_append = builder.num_computed_tokens.append
        ids_append = builder.input_ids.append
        num_before = len(builder.rows)
        for seq in list(self._state.decoding.values()):
            if seq.slot < 0:
                continue  # preempted for an earlier row
            computed = seq.num_computed_tokens
            if computed + 1 >= seq.max_length:
                continue  # its last token is on the way
            if computed >= seq.num_block_tokens and not self._room.provide(seq, computed + 1, builder):
                continue
            rows_append(seq)
            slots_append(seq.slot)
            computed_append(computed)
            ids_append(DEFERRED_TOKEN if seq.num_in_flight_tokens else seq.token_ids[-1])
            seq.num_computed_tokens = computed + 1
            seq.num_in_flight_tokens += 1
            seq.last_step = step
        num_rows = len(builder.rows) - num_before
        builder.num_scheduled_tokens += [1] * num_rows
        builder.samples += [True] * num_rows
        builder.budget -= num_rows

    def _swap_in(self, builder: BatchBuilder) -> None:
        """Brings back swapped sequences while there is room. They stand in one line with those that wait."""
        state = self._state
        waiting = state.waiting.peek()
        while (head := state.swapped.peek()) is not None:
            order, seq = head
            if waiting is not None and waiting[0] < order:
                return
            if not builder.budget or seq.num_in_flight_tokens or not self._admission.try_swap_in(seq, builder):
                return
            state.start(seq)
            builder.bind(seq)
            self._add_row(seq, self._admission.chunk(seq.num_tokens - seq.num_computed_tokens, builder), builder)

    def _schedule_prefills(self, builder: BatchBuilder) -> None:
        for seq in list(self._state.prefilling.values()):
            self._schedule_prefill(seq, builder)
        if not builder.is_blocked and self._is_delay_over():
            while builder.budget and self._admit_next(builder):
                pass

    def _schedule_prefill(self, seq: Sequence, builder: BatchBuilder) -> None:
        """The next chunk of a running sequence whose known tokens are not all scheduled."""
        if seq.slot < 0 or seq.last_step == builder.step:
            return
        num_tokens = self._chunk(seq, seq.num_known_tokens, builder)
        if num_tokens and self._room.provide(seq, seq.num_computed_tokens + num_tokens, builder):
            if not seq.is_bound:
                builder.bind(seq)
            self._add_row(seq, num_tokens, builder)

    def _chunk(self, seq: Sequence, end: int, builder: BatchBuilder) -> int:
        """Tokens of `seq` in this step, of those up to `end`; not beyond a place where its state is kept."""
        if seq.checkpoints_at:
            end = min(end, seq.checkpoints_at[0])
        return self._admission.chunk(end - seq.num_computed_tokens, builder)

    def _add_row(self, seq: Sequence, num_tokens: int, builder: BatchBuilder) -> None:
        if builder.add_row(seq, num_tokens):
            if seq.beam_group is not None:
                builder.mark_beam(seq.beam_group.search.num_candidates)
            else:
                seq.num_in_flight_tokens += 1
        if seq.checkpoints_at and seq.num_computed_tokens == seq.checkpoints_at[0]:
            del seq.checkpoints_at[0]
            checkpoint = self._state.blocks.add_checkpoint(seq)
            if checkpoint is not None:
                self._state.holdings.states_to_copy[checkpoint] = seq.group_id
        self._state.place(seq)

    def _is_delay_over(self) -> bool:
        wakeup = self.delay_wakeup()
        return wakeup is None or self._state.clock() >= wakeup

    def delay_wakeup(self) -> float | None:
        """When the delay factor lets the head of the queue in; None if nothing holds it back."""
        state = self._state
        if not self._config.scheduler_delay_factor or not state.has_decodes:
            return None
        head = state.waiting.peek()
        if head is None:
            return None
        return head[1].time_queued + self._config.scheduler_delay_factor * state.last_prefill_seconds

    def _admit_next(self, builder: BatchBuilder) -> bool:
        """Admits the head of the queue, or has it step aside for blocks that are being computed. False, changing
        nothing, if it has to wait: nobody overtakes it, nor does it overtake one that is swapped."""
        state = self._state
        head = state.waiting.peek()
        if head is None:
            return False
        order, seq = head
        swapped = state.swapped.peek()
        if swapped is not None and swapped[0] < order:
            return False
        if seq.num_in_flight_tokens:
            return False
        entrance = self._admission.admit(seq, builder)
        if entrance is Entrance.ADMITTED:
            state.start(seq)
            builder.bind(seq)
            self._add_row(seq, self._chunk(seq, seq.num_tokens, builder), builder)
        return entrance is not Entrance.WAITS
