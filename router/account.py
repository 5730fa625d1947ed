"""What is counted of a request when it is closed, and the one line that the log has of it."""

import logging
import os
from collections.abc import Sequence

from common.faults import shown
from common.tracing import Span, Tracer, trace_id
from router.answering.request import OpenRequest
from router.latency import Stopwatch
from router.metrics import RequestTotals, RouterMetrics

logger = logging.getLogger(__name__)

_FAULTS = frozenset({"unknown", "deadline_exceeded", "unimplemented", "internal", "unavailable", "data_loss"})
"""Ends that OpenTelemetry counts as errors of a server; the others are the client's."""


class Account:
    """Of one request, from its arrival to its end. Exactly one `close`, whatever becomes of it."""

    def __init__(
        self, request_id: str, model: str, caller: str, operation: str, tracer: Tracer, traceparent: str
    ) -> None:
        """`request_id`, `model` and `traceparent` are the client's, or empty; `caller` is its name; `operation` is
        OpenTelemetry's name of what is asked for."""
        self.watch = Stopwatch()
        self.request_id = request_id or os.urandom(16).hex()
        self.model = ""
        """Id of the model that serves it, once that is known."""
        self.end = "cancelled"
        """Finish reason or gRPC status, in lower case; nobody says so when a client goes."""
        self._asked_model = model
        self._caller = caller
        self._operation = operation
        self._tracer = tracer
        asked = {"gen_ai.operation.name": operation, "gen_ai.request.model": shown(model)} if tracer.is_on else None
        self.span = tracer.span(operation, traceparent, "server", asked)
        self._opened: Sequence[OpenRequest] = ()

    def served_by(self, model: str) -> None:
        """The id of the model that was asked for, by whatever name."""
        self.model = model
        self.span.rename(f"{self._operation} {model}")

    def part(self, name: str) -> Span:
        """Something that is done for the request now; for a `with` block."""
        return self._tracer.span(name, self.span.traceparent)

    def opened(self, requests: Sequence[OpenRequest]) -> None:
        """One for each prompt."""
        self._opened = requests

    def close(self, metrics: RouterMetrics) -> None:
        workers = list(dict.fromkeys([request.worker for request in self._opened if request.worker]))
        totals = RequestTotals(self.end, self.model, workers[0] if workers else "")
        for request in self._opened:
            totals.num_prompt_tokens += len(request.spec.prompt.token_ids)
            totals.num_cached_tokens += request.num_cached_tokens
            totals.num_expected_cached_tokens += request.num_expected_cached_tokens
            totals.num_completion_tokens += request.num_completion_tokens
        metrics.ended(totals)
        if self._tracer.is_on:
            self._end_span(totals)
        if logger.isEnabledFor(logging.INFO):
            self._log(totals, workers)

    @property
    def _ttft(self) -> float | None:
        first_tokens = (request.timing.watch.ttft for request in self._opened)
        return min((ttft for ttft in first_tokens if ttft is not None), default=None)

    def _end_span(self, totals: RequestTotals) -> None:
        seen: dict[str, str | int | float | list[str]] = {
            "gen_ai.response.id": shown(self.request_id),
            "gen_ai.response.model": self.model,
            "gen_ai.usage.input_tokens": totals.num_prompt_tokens,
            "gen_ai.usage.output_tokens": totals.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": totals.num_cached_tokens,
        }
        if (ttft := self._ttft) is not None:
            seen["gen_ai.response.time_to_first_chunk"] = ttft
        is_answered = any(request.is_finished for request in self._opened)
        seen |= {"gen_ai.response.finish_reasons": [self.end]} if is_answered else {"error.type": self.end}
        self.span.end(seen, error=self.end if self.end in _FAULTS else "")

    def _log(self, totals: RequestTotals, workers: Sequence[str]) -> None:
        ttft, e2e = self._ttft, self.watch.elapsed
        request_id, model = shown(self.request_id), shown(self.model or self._asked_model)
        trace = trace_id(self.span.traceparent)
        logger.info(
            "request %s from %s%s: model %s, worker %s, %d tokens in, %d cached, %d out, TTFT %s, total %.1f ms, %s",
            request_id,
            self._caller,
            f" of trace {trace}" if trace else "",
            model or "-",
            " ".join(workers) or "-",
            totals.num_prompt_tokens,
            totals.num_cached_tokens,
            totals.num_completion_tokens,
            "-" if ttft is None else f"{ttft * 1e3:.1f} ms",
            e2e * 1e3,
            totals.end,
            extra={
                "request_id": request_id,
                "caller": self._caller,
                "model": model,
                "worker": " ".join(workers),
                "num_prompt_tokens": totals.num_prompt_tokens,
                "num_cached_tokens": totals.num_cached_tokens,
                "num_completion_tokens": totals.num_completion_tokens,
                "ttft_seconds": None if ttft is None else round(ttft, 6),
                "e2e_seconds": round(e2e, 6),
                "end": totals.end,
                **({"trace_id": trace} if trace else {}),
            },
        )
