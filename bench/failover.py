"""How long a stream stands still when its worker is lost: killed, stopped, or with a stopped rank.

Two real workers of a tiny model and a router, as processes; one stream, whose worker is hurt. The figure is the longest
time without a token after the blow: what noticing takes, and a prefill that costs little.
"""

import itertools
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import Figure, finish, median, parse_arguments
from fissile import Client
from tests.e2e.fleet import Fleet, Service, running_fleet

PACKAGES = ("grpcio", "torch", "fissile")
NUM_TOKENS = 3000
BEGIN_TOKENS = 20
"""That come before the blow."""

Blow = Callable[[Service], None]
BLOWS: dict[str, Blow] = {
    "killed": lambda worker: worker.signal(signal.SIGKILL),
    "stopped": lambda worker: worker.signal(signal.SIGSTOP),
    "stopped_rank": lambda worker: worker.signal_rank(signal.SIGSTOP),
}


def main() -> None:
    quick = parse_arguments(__doc__).quick
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder), 2, 1) as fleet:
        for name, blow in BLOWS.items():
            seconds = [standstill(fleet, blow) for _ in range(1 if quick else 5)]
            figures |= {f"{name}_next_token_s": median(seconds), f"{name}_next_token_max_s": round(max(seconds), 2)}
    finish("failover", figures, quick=quick, dtype="float32", threads=1, packages=PACKAGES)


def standstill(fleet: Fleet, blow: Blow) -> float:
    """The longest gap between two tokens after the blow, in seconds; the fleet is whole again afterwards."""
    with Client(fleet.addresses) as client:
        stream = client.generate("hello", max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0, return_token_ids=True)
        num_tokens = 0
        while num_tokens < BEGIN_TOKENS:
            num_tokens += len(next(stream).token_ids)
        busy = next(worker for worker in client.stats().workers if worker.num_open_requests)
        victim = next(worker for worker in fleet.workers if worker.address == busy.address)
        times = [time.monotonic()]
        blow(victim)
        for delta in stream:
            num_tokens += len(delta.token_ids)
            times.append(time.monotonic())
    assert num_tokens == NUM_TOKENS
    fleet.restore()
    return max(later - earlier for earlier, later in itertools.pairwise(times))


if __name__ == "__main__":
    main()
