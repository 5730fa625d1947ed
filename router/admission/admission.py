"""What clients share of a router, in one place."""

from dataclasses import dataclass

from router.admission.budget import Budget
from router.admission.ration import Ration
from router.admission.turns import Turns
from router.admission.worker_queue import WorkerQueue
from router.config import RouterSettings


@dataclass(frozen=True, slots=True)
class Admission:
    """By name of the caller."""

    places: Budget
    """Of open requests."""
    held_bytes: Budget
    """Of requests, and of answers that are not read yet."""
    connections: Budget
    """Of the HTTP front, by host; gRPC counts its own."""
    ration: Ration
    turns: Turns
    queue: WorkerQueue


def make_admission(settings: RouterSettings) -> Admission:
    ration = Ration()
    return Admission(
        places=Budget(settings.max_open_requests, "open requests", "max-open-requests"),
        held_bytes=Budget(settings.max_held_bytes, "bytes of requests and answers", "max-held-bytes"),
        connections=Budget(settings.max_connections, "connections", "max-connections"),
        ration=ration,
        turns=Turns(settings.tokenizer_threads, ration),
        queue=WorkerQueue(settings.max_queued_requests, ration),
    )
