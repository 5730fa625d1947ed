"""Workers as policies see them."""

from dataclasses import dataclass, field
from itertools import count

from router.fleet.load import LoadTracker
from router.fleet.policies.policy import Work

_ids = count(1)

NOTHING = Work(())


@dataclass
class Worker:
    address: str
    load: LoadTracker = field(default_factory=lambda: LoadTracker(block_size=4))

    @property
    def session(self) -> tuple[str, int]:
        return self.address, 1

    def open(self, times: int = 1, num_prefill_tokens: int = 0) -> None:
        """Groups of one sequence."""
        for _ in range(times):
            self.load.opened([next(_ids)], num_prefill_tokens)


def workers(*open_counts: int) -> list[Worker]:
    result = [Worker(name) for name, _ in zip("abcdefgh", open_counts, strict=False)]
    for worker, times in zip(result, open_counts, strict=True):
        worker.open(times)
    return result


def chosen(policy, candidates, times: int = 1, work: Work = NOTHING) -> str:
    return "".join(policy.choose(work, candidates).worker.address for _ in range(times))
