"""What is counted of a request when it is closed, and the one line that the log has of it."""

import logging
import uuid
from collections.abc import Sequence

from router.answering.request import OpenRequest
from router.latency import Stopwatch
from router.metrics import RequestTotals, RouterMetrics

logger = logging.getLogger(__name__)

MAX_SHOWN = 128
"""Characters of a client's own words in a line."""


class Account:
    """Of one request, from its arrival to its end. Exactly one `close`, whatever becomes of it."""

    def __init__(self, request_id: str, model: str) -> None:
        """As the client gave them, or empty."""
        self.watch = Stopwatch()
        self.request_id = request_id or uuid.uuid4().hex
        self.model = ""
        """Id of the model that serves it, once that is known."""
        self.end = "cancelled"
        """Finish reason or gRPC status, in lower case; nobody says so when a client goes."""
        self._asked_model = model
        self._opened: Sequence[OpenRequest] = ()

    def opened(self, requests: Sequence[OpenRequest]) -> None:
        """One for each prompt."""
        self._opened = requests

    def close(self, metrics: RouterMetrics) -> None:
        workers = list(dict.fromkeys(request.worker for request in self._opened if request.worker))
        totals = RequestTotals(
            end=self.end,
            model=self.model,
            worker=workers[0] if workers else "",
            num_prompt_tokens=sum(len(request.spec.prompt.token_ids) for request in self._opened),
            num_cached_tokens=sum(request.num_cached_tokens for request in self._opened),
            num_completion_tokens=sum(request.num_completion_tokens for request in self._opened),
        )
        metrics.ended(totals)
        if logger.isEnabledFor(logging.INFO):
            self._log(totals, workers)

    def _log(self, totals: RequestTotals, workers: Sequence[str]) -> None:
        first_tokens = [request.timing.watch.ttft for request in self._opened if request.timing.watch.ttft is not None]
        ttft, e2e = min(first_tokens, default=None), self.watch.elapsed
        request_id, model = shown(self.request_id), shown(self.model or self._asked_model)
        logger.info(
            "request %s: model %s, worker %s, %d tokens in, %d cached, %d out, TTFT %s, total %.1f ms, %s",
            request_id,
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
                "model": model,
                "worker": " ".join(workers),
                "num_prompt_tokens": totals.num_prompt_tokens,
                "num_cached_tokens": totals.num_cached_tokens,
                "num_completion_tokens": totals.num_completion_tokens,
                "ttft_seconds": None if ttft is None else round(ttft, 6),
                "e2e_seconds": round(e2e, 6),
                "end": totals.end,
            },
        )


def shown(text: str) -> str:
    """A client's own words, fit for a line: a request that is refused may hold anything."""
    cut = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
    return cut if cut.isprintable() else ascii(cut)
