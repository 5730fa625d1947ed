"""Takes in what a step brought: commits tokens, ends sequences, publishes blocks."""

from worker.core.batch import BatchOutput, TokenLogprobs
from worker.core.outputs import SequenceOutput
from worker.core.scheduling.beam_steps import BeamSteps
from worker.core.scheduling.state import InFlightStep, SchedulerState
from worker.core.sequence import Sequence, SequenceStatus
from worker.core.stopping import FinishReason, find_stop


class Committer:
    """Applies step results to the state. One rule for late ones: whoever has ended gets nothing more.

    A sequence that was preempted after the step had started keeps the token; the step saw its blocks untouched.
    """

    def __init__(self, state: SchedulerState, beams: BeamSteps) -> None:
        self._state = state
        self._config = state.config
        self._blocks = state.blocks
        self._beams = beams

    def commit(self, step: InFlightStep, output: BatchOutput) -> None:
        """Takes in what `step` brought. After it the state is whole."""
        state = self._state
        state.holdings.retire(step.batch.step)
        state.counters.generated_tokens += self._commit_rows(step, output)
        for row in step.batch.beam_rows:
            # A search that ended meanwhile has dropped its beams.
            if row in output.candidates and not step.rows[row].is_ended:
                self._beams.receive(step.rows[row], output.candidates[row])
        if state.groups.num_parked:
            self._unpark(step.rows)
        if state.leaders:
            state.requeue(state.leaders.advance(step.rows))
        if step.has_prefill:
            state.last_prefill_seconds = output.run_seconds

    def _commit_rows(self, step: InFlightStep, output: BatchOutput) -> int:
        """The hot loop: in the common case one token per row that does not stop anything (see stopping.py). Returns
        how many tokens are kept."""
        state = self._state
        now = state.clock()
        publish = self._blocks.publish
        running = SequenceStatus.RUNNING
        over = (SequenceStatus.FINISHED, SequenceStatus.ABORTED)
        num_generated = 0
        special = output.errors.keys() | step.batch.num_draft_tokens.keys()
        for row, (seq, tokens, computed, scheduled) in enumerate(
            zip(
                step.rows,
                output.token_ids,
                step.batch.num_computed_tokens,
                step.batch.num_scheduled_tokens,
                strict=True,
            )
        ):
            if special and row in special:
                num_generated += self._commit_special(row, step, output)
                continue
            status = seq.status
            if status is not running and status in over:
                continue
            # Only what this step wrote: a sequence that came back meanwhile has other blocks, which a later step fills.
            if computed + scheduled >= seq.publish_at and status is running and step.batch.step >= seq.bound_step:
                publish(seq, computed + scheduled)
            if output.prompt_logprobs and row in output.prompt_logprobs:
                self._report_prompt_logprobs(seq, computed, output.prompt_logprobs[row])
            if not tokens:
                continue
            token_ids = seq.token_ids
            seq.num_in_flight_tokens -= 1
            logprobs = output.logprobs.get(row) if output.logprobs else None
            is_first = seq.time_first_token is None
            if is_first:
                seq.time_first_token = now
                state.has_urgent_outputs = True
            # One token that ends nothing, be it a stop sequence, below every limit: find_stop would go on.
            if len(tokens) == 1 and tokens[0] not in seq.stopping_token_ids and len(token_ids) + 1 < seq.max_length:
                num_generated += 1
                token_ids.append(tokens[0])
                news = SequenceOutput(seq.id, seq.index, len(token_ids) - 1 - seq.num_prompt_tokens, tokens)
                news.logprobs = logprobs
                state.outputs.append(news)
            else:
                num_generated += self._commit_with_stops(seq, tokens, logprobs)
            if is_first:
                news = state.outputs[-1]
                news.num_cached_tokens, news.timings = seq.num_cached_tokens, seq.timings
        return num_generated

    def _commit_special(self, row: int, step: InFlightStep, output: BatchOutput) -> int:
        """A row that failed, or one with drafts. Returns how many tokens are kept."""
        seq = step.rows[row]
        if row in output.errors:
            self._fail(seq, output.errors[row], is_request_fault=row in output.unsatisfiable_rows)
        elif not seq.is_ended:
            num_drafts = step.batch.num_draft_tokens[row]
            return self._commit_verified(seq, output.token_ids[row], num_drafts, output.logprobs.get(row))
        return 0

    def _fail(self, seq: Sequence, detail: str, *, is_request_fault: bool) -> None:
        if not is_request_fault:
            # What it found in the cache may be as broken as what it computed, so neither is found again. That holds
            # for one that has ended or was preempted meanwhile, too.
            self._blocks.withdraw(seq)
        if seq.is_ended:
            return
        root = seq.beam_group.root if seq.beam_group is not None else seq
        self._state.end(root, FinishReason.ERROR, detail, [])
        self._state.outputs[-1].is_request_fault = is_request_fault

    def _commit_with_stops(self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Returns how many are kept: what comes after a stop is neither emitted nor counted."""
        kept, reason = find_stop(seq.token_ids, tokens, seq.num_prompt_tokens, seq.stop, seq.max_length)
        seq.token_ids.extend(tokens[:kept])
        self._report(seq, tokens[:kept], reason, logprobs)
        return kept

    def _commit_verified(
        self, seq: Sequence, tokens: list[int], num_drafts: int, logprobs: list[TokenLogprobs] | None
    ) -> int:
        """What came of a row with drafts: those that were right, and a token more. Returns how many are kept.

        The cache has what was right; what is behind that will be written anew before anybody reads it.
        """
        num_accepted = len(tokens) - 1
        self._state.counters.draft_tokens += num_drafts
        self._state.counters.accepted_counts[num_accepted] += 1
        seq.num_draft_tokens += num_drafts
        seq.num_accepted_tokens += num_accepted
        # Where drafts are wrong the next row tries fewer, and one is enough to see that they are right again.
        seq.draft_limit = max(2 * num_accepted, 1)
        seq.num_in_flight_tokens -= 1 + num_drafts
        kept, reason = find_stop(seq.token_ids, tokens, seq.num_prompt_tokens, seq.stop, seq.max_length)
        seq.token_ids.extend(tokens[:kept])
        # Nothing was scheduled in between, so it is where every decoding sequence is: one token behind.
        seq.num_computed_tokens = seq.num_tokens - 1
        if seq.num_computed_tokens >= seq.publish_at:
            self._blocks.publish(seq, seq.num_computed_tokens)
        self._report(seq, tokens[:kept], reason, logprobs)
        return kept

    def _report(
        self, seq: Sequence, tokens: list[int], reason: FinishReason | None, logprobs: list[TokenLogprobs] | None
    ) -> None:
        """Tokens that are committed already, and the end, if this is it."""
        if reason is not None:
            self._state.end(seq, reason, "", tokens)
        else:
            offset = seq.num_generated_tokens - len(tokens)
            self._state.outputs.append(SequenceOutput(seq.id, seq.index, offset, tokens))
        self._state.outputs[-1].logprobs = logprobs[: len(tokens)] if logprobs is not None else None

    def _report_prompt_logprobs(self, seq: Sequence, num_computed_tokens: int, entries: list[TokenLogprobs]) -> None:
        """At once, so that nobody holds those of a long prompt. `entries` belong to the tokens after
        `num_computed_tokens`, from the second of the prompt on; after a preemption the same come again."""
        offset = seq.num_prompt_logprobs
        entries = entries[max(offset - num_computed_tokens, 0) :]
        if entries and seq.needs_whole_prompt:
            seq.num_prompt_logprobs += len(entries)
            news = SequenceOutput(seq.id, seq.index, seq.num_generated_tokens, [])
            news.prompt_logprobs, news.prompt_logprobs_offset = entries, offset
            self._state.outputs.append(news)
            self._state.has_urgent_outputs = True

    def _unpark(self, rows: list[Sequence]) -> None:
        for seq in rows:
            if seq.num_computed_tokens >= seq.num_prompt_tokens:
                self._state.requeue(self._state.groups.unpark(seq))
