"""When what of a request came: told to its client, and counted."""

from google.protobuf.duration_pb2 import Duration

from fissile.v1 import RequestTimings
from router.latency import Stopwatch
from router.metrics import HopMetrics


class Timing:
    """Of one request, on whatever workers it is."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self._hop: HopMetrics | None = None
        self._message = RequestTimings()

    def on_hop(self, metrics: HopMetrics) -> None:
        """What comes now comes from this worker."""
        self._hop = metrics

    def tokens_came(self, now: float) -> None:
        is_first = self.watch.first_token is None
        gap = self.watch.tokens_came(now)
        assert self._hop is not None, "tokens come from a hop"
        if is_first and self.watch.ttft is not None:
            self._hop.first_token(self.watch.ttft)
        elif gap is not None:
            self._hop.token_gap(gap)

    def worker_queued(self, queued: Duration) -> None:
        self._message.worker_queued.CopyFrom(queued)

    def completed(self, num_tokens: int) -> RequestTimings:
        """Once, at the end. `num_tokens` of the longest completion."""
        watch, message = self.watch, self._message
        tpot = watch.tpot(num_tokens)
        for duration, seconds in (
            (message.ttft, watch.ttft),
            (message.tpot, tpot),
            (message.e2e, watch.elapsed),
            (message.max_itl, watch.max_gap or None),
        ):
            if seconds is not None:
                duration.FromNanoseconds(int(seconds * 1e9))
        assert self._hop is not None, "what is finished was on a hop"
        self._hop.completed(watch, tpot)
        return message
