"""One open request: what was asked, what came back so far, and its one end.

Its worker link feeds it (`on_output`, `on_lost`) and never waits; the call's `Answer` takes what is new whenever the
client is ready for it and the pacer lets it. In between, news merge into one pending delta per completion, so a slow
client costs the tokens of its completion and what it asked for with them, up to a bound.
"""

import asyncio
import logging
from collections.abc import Sequence

from common.faults import log_fault
from fissile.errors import MAX_MESSAGE_BYTES, FissileError, InternalError, ResourceExhaustedError, cut
from fissile.v1 import BeamHypothesis, FinishReason, RequestOutput, Usage
from router.admission.unread import UnreadBytes
from router.answering.completion import Completion, TokenGapError
from router.answering.hop import Hop, Loss, OnLoss, Stay
from router.answering.in_turn import CompletionsInTurn
from router.answering.pacing import News, Pacer
from router.answering.prompt_logprobs import PromptLogprobs
from router.answering.refusals import error_of
from router.answering.timing import Timing
from router.answering.trace import RequestTrace
from router.answering.update import ENTRIES_PER_MESSAGE, ENTRY_BYTES, MAX_ENTRIES, TOKEN_BYTES, Update, unread_bytes
from router.asking.spec import RequestSpec
from router.latency import Stopwatch
from router.metrics import RouterMetrics
from router.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Looking a value up in a protobuf enum takes as long as decoding a token.
_ERROR = FinishReason.FINISH_REASON_ERROR
_ABORTED = FinishReason.FINISH_REASON_ABORTED


class OpenRequest:
    """See above. `error` ends it with a status."""

    def __init__(
        self,
        spec: RequestSpec,
        tokenizer: Tokenizer,
        watch: Stopwatch,
        metrics: RouterMetrics,
        pacer: Pacer,
        news: News,
        unread: UnreadBytes,
        trace: RequestTrace,
    ) -> None:
        """`news` is set when there is something to take, or an error; requests of one call share it."""
        self.spec = spec
        self.timing = Timing(watch)
        self.news = news
        self.trace = trace
        self.error: FissileError | None = None
        detokenizer = tokenizer.detokenizers(
            spec.prompt.token_ids,
            skip_special_tokens=spec.skip_special_tokens,
            shown=spec.text.shown_tokens,
            is_eager=bool(spec.text.stops),
        )
        self.completions = [Completion(i, spec.text, detokenizer(), tokenizer.token_bytes) for i in range(spec.n)]
        self._in_turn = CompletionsInTurn(self.completions)
        num_prompt_logprobs = len(spec.prompt.token_ids) - 1 if spec.wants_prompt_logprobs else 0
        self._prompt_logprobs = PromptLogprobs(num_prompt_logprobs, tokenizer.token_bytes)
        self._metrics = metrics
        self._pacer = pacer
        self._unread = unread
        self._has_logprobs = spec.text.send_logprobs or spec.wants_prompt_logprobs
        self._num_unfinished = spec.n
        self._has_sent = False
        self._stay: Stay | None = None
        self.worker = ""
        """Address of the one it is on or was on last; empty: it came to none."""
        self.num_cached_tokens = 0
        self.num_expected_cached_tokens = 0
        """Of the prompt, when it went to its first worker."""
        self.has_begun = False
        """Some worker has begun to answer: another one must go on with the same answer."""

    @property
    def is_finished(self) -> bool:
        return not self._num_unfinished

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def awaits_first_output(self) -> bool:
        """It is on a worker that has said nothing of it yet."""
        return self._stay is not None and self._stay.awaits_first_output

    def put_on(
        self,
        hop: Hop,
        first_token_timeout: float,
        deadline: float | None,
        on_loss: OnLoss,
        *,
        num_cached_tokens: int,
    ) -> None:
        """Send what is not finished to a worker; `on_loss` hears if the hop ends before that. `deadline`: seconds left.
        `num_cached_tokens`: of the prompt, that are expected to be cached there. Raises InvalidArgumentError if it is
        too large for a message."""
        unfinished = [c for c in self.completions if not c.finish]
        if self.spec.is_beam_search:
            unfinished = unfinished[:1]
        group = self.spec.group(
            {c.index: c.token_ids for c in unfinished},
            asks_prompt_logprobs=not self._prompt_logprobs.is_complete,
            deadline=deadline,
        )
        group.traceparent = self.trace.put_on(hop.address)
        ids = hop.start(group, self, num_cached_tokens)
        if not self.worker:
            self.num_expected_cached_tokens = num_cached_tokens
        self.worker = hop.address
        self.timing.on_hop(self._metrics.hop(self.spec.model, hop.address, hop.latency))
        timed_out = f"no token within {first_token_timeout:g} s"
        timer = asyncio.get_running_loop().call_later(first_token_timeout, self.on_stalled, timed_out)
        self._stay = Stay(hop, ids, unfinished, on_loss, timer)

    def on_output(self, output: RequestOutput, now: float) -> None:
        """From the link. `now`: when the message came. Raises nothing: a fault ends this request, not the link."""
        try:
            self._accept(output, now)
        except TokenGapError as gap:
            self.on_stalled(f"tokens got lost: {gap}")
        except ResourceExhaustedError as error:
            self.fail(error)
        except Exception as error:
            self.crash(error)

    def _accept(self, output: RequestOutput, now: float) -> None:
        stay = self._stay
        completion = stay.completion(output.sequence_id) if stay else None
        if stay is None or completion is None:
            return
        is_first = stay.output_came()
        if output.finish_reason == _ERROR:
            self._refused(stay, output)
            return
        if output.finish_reason == _ABORTED:
            self.on_lost(f"aborted by the worker: {cut(output.detail, MAX_MESSAGE_BYTES)}")
            return
        self.has_begun = True
        if is_first:
            stay.succeeded()
        self._take_in(completion, output, now)
        if completion.finish:
            self._num_unfinished = 0 if output.hypotheses else self._num_unfinished - 1
            stay.ended(output.sequence_id, by_worker=bool(output.finish_reason))
            if self.is_finished:
                self.trace.left()
                self._pacer.wake_now(self.news)
                return
        self._announce()

    def _take_in(self, completion: Completion, output: RequestOutput, now: float) -> None:
        """What an output brings, its end included. Raises TokenGapError, ResourceExhaustedError where the client has
        too much to read, and InternalError."""
        if output.index == 0 and not completion.token_ids:
            # Later completions share the first one's prompt, and a resumed one finds what it had computed itself.
            self.num_cached_tokens = output.num_cached_tokens
        num_tokens = len(output.token_ids)
        self._unread.add(unread_bytes(output) if self._has_logprobs else num_tokens * TOKEN_BYTES)
        if not self._prompt_logprobs.is_complete:
            self._prompt_logprobs.accept(output)
            if num_tokens and not self._prompt_logprobs.is_complete:
                raise InternalError("the worker sent tokens before all log probabilities of the prompt")
        if hypotheses := output.hypotheses:
            self._accept_hypotheses(hypotheses)
        else:
            completion.accept(output, self.spec.max_tokens)
        if num_tokens or hypotheses:
            self.timing.tokens_came(now)
        if output.HasField("timings"):
            self.timing.worker_queued(output.timings.queued)

    def _announce(self) -> None:
        """Wake the handler for news that are not the last."""
        if self.spec.final_only:
            return
        wake = self._pacer.wake_in_turn if self._has_sent else self._pacer.wake_now
        wake(self.news)

    def _accept_hypotheses(self, hypotheses: Sequence[BeamHypothesis]) -> None:
        if len(hypotheses) < self.spec.n:
            raise InternalError(f"{len(hypotheses)} hypotheses for n = {self.spec.n}")
        for completion, hypothesis in zip(self.completions, hypotheses, strict=False):
            completion.accept_hypothesis(hypothesis)

    def _refused(self, stay: Stay, output: RequestOutput) -> None:
        error = error_of(output, self.spec.prompt)
        if error.retry_after is None:
            if isinstance(error, InternalError):
                stay.failed()
            self.fail(error)
        elif output.worker_failed:
            self._lose(Loss(error.message, worker_died=True))
        else:
            self._lose(Loss(f"refused: {error.message}", refusal=error))

    def on_lost(self, detail: str, *, worker_died: bool = False) -> None:
        """The hop is over: its link broke, or it gave the request back."""
        self._lose(Loss(detail, worker_died))

    def on_stalled(self, detail: str) -> None:
        """The worker goes on, but not with this one, or not well."""
        self._lose(Loss(detail, is_fault=True))

    def _lose(self, loss: Loss) -> None:
        stay = self._stay
        if stay and not self.is_finished:
            self.trace.lost(loss.detail)
            if loss.worker_died or loss.is_fault:
                stay.failed()
            self._leave()
            stay.on_loss(loss)

    def fail(self, error: FissileError) -> None:
        """End with a status. The first one counts."""
        if self.error is None:
            self.error = error
            self._leave()
            self._pacer.wake_now(self.news)

    def crash(self, error: Exception) -> None:
        """End by a fault of our own."""
        log_fault(logger, error, "request %s failed", self.spec.request_id)
        self.fail(InternalError("internal error; the server's log has the details"))

    def close(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._leave()
        self._pacer.forget(self.news)
        self._unread.release()

    def _leave(self) -> None:
        """Abort what is on a worker. Idempotent."""
        self.trace.left()
        stay, self._stay = self._stay, None
        if stay:
            stay.leave()

    def take(self, max_entries: int = MAX_ENTRIES) -> Update | None:
        """What is new for the client; None when nothing is. Has `usage` when it is the last. It has no more entries of
        log probabilities than that: the rest comes in turn."""
        finished = self.is_finished
        if not finished and self.spec.final_only:
            return None
        update = Update()
        if self._prompt_logprobs.num_parts > 1:
            self.news.set()  # there is more
        elif self._prompt_logprobs.is_complete or finished:
            update.deltas, is_cut = self._in_turn.take(cumulative=self.spec.cumulative, max_entries=max_entries)
            if is_cut:
                self._pacer.wake_in_turn(self.news)
            if finished and not any(c.has_news for c in self.completions):
                update.usage = self._usage()
                update.timings = self.timing.completed(max(len(c.token_ids) for c in self.completions))
            elif not update.deltas:
                return None
        else:
            return None
        update.prompt_logprobs = self._prompt_logprobs.take()
        if not self._has_sent and self.spec.send_prompt:
            update.prompt_token_ids = self.spec.prompt.token_ids
        self._has_sent = True
        if self._has_logprobs:
            self._pacer.charge(self.news, update.count_entries() / ENTRIES_PER_MESSAGE)
        if not self.spec.cumulative:
            num_entries = sum(c.num_entries for c in self.completions) if self._has_logprobs else 0
            self._unread.taken(self._prompt_logprobs.num_bytes + num_entries * ENTRY_BYTES)
        return update

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=len(self.spec.prompt.token_ids),
            num_completion_tokens=self.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_reasoning_tokens=sum(c.num_reasoning_tokens for c in self.completions),
        )
