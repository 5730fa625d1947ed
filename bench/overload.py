"""Overload: far more requests at once than the cache can hold. Steps, preemptions and tokens that are computed again.

The scheduler alone with a runner that only counts: 256 requests, prompts of 100 tokens, outputs of 500 to 1,500, a pool
of 16,384 tokens, a context of 8,192, 64 slots. Compared with simple rules that see no scheduler at all.
"""

import itertools
import random
from collections import deque
from dataclasses import dataclass
from typing import Literal

from bench.common import Figure, finish, parse_arguments
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.config import CacheConfig, PreemptionMode, SchedulerConfig
from worker.core.params import StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.engine.steps import Steps, run_to_end

PROMPT = 100
SHORTEST, LONGEST = 500, 1500
BLOCK_SIZE = 16
NUM_BLOCKS = 1024
CONTEXT = 8192
NUM_SLOTS = 64
NUM_URGENCIES = 3
EOS = 1

Policy = Literal["fcfs", "priority"]


@dataclass(slots=True)
class Outcome:
    """Of one simulation, or of several added up."""

    steps: int = 0
    preemptions: int = 0
    most_preemptions: int = 0
    """Of one request."""
    recomputed_tokens: int = 0

    def add(self, other: "Outcome") -> None:
        self.steps += other.steps
        self.preemptions += other.preemptions
        self.most_preemptions = max(self.most_preemptions, other.most_preemptions)
        self.recomputed_tokens += other.recomputed_tokens


class CountingRunner:
    """Samples a token for each row that is due, and EOS where the output has the length that was drawn for it."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._slots: dict[int, int] = {}
        self._outputs: deque[BatchOutput] = deque()
        self.num_tokens = 0

    def submit(self, batch: ScheduledBatch) -> None:
        self._outputs.append(self._run(batch))

    def collect(self, timeout: float) -> BatchOutput:
        return self._outputs.popleft()

    def _run(self, batch: ScheduledBatch) -> BatchOutput:
        self.num_tokens += batch.num_tokens
        for new in batch.new_sequences:
            self._slots[new.slot] = PROMPT + self._lengths[new.token_ids[0] - EOS - 1]
        ends = (at + num for at, num in zip(batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True))
        rows = zip(batch.slots, ends, batch.samples, strict=True)
        tokens = [[EOS if end + 1 == self._slots[slot] else 0] if samples else [] for slot, end, samples in rows]
        return BatchOutput(step=batch.step, token_ids=tokens)


def make_sequence(number: int, max_tokens: int, priority: int) -> Sequence:
    """Its prompt tells the runner which one it is."""
    stop = StopConditions(max_tokens=max_tokens, eos_token_ids=frozenset({EOS}))
    tokens = [number + EOS + 1] * PROMPT
    return Sequence(id=number, token_ids=tokens, num_prompt_tokens=PROMPT, stop=stop, priority=priority)


def simulate(lengths: list[int], *, is_exact: bool, policy: Policy, mode: PreemptionMode) -> Outcome:
    """All of it through the scheduler; `is_exact`: `max_tokens` is the drawn length, else the rest of the context."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=CONTEXT, max_num_seqs=NUM_SLOTS, preemption_policy=policy, preemption_mode=mode, async_depth=0
        ),
        CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_host_blocks=NUM_BLOCKS if mode == "swap" else 0),
    )
    for number, length in enumerate(lengths):
        priority = number % NUM_URGENCIES if policy == "priority" else 0
        scheduler.add(make_sequence(number, length if is_exact else CONTEXT - PROMPT, priority))
    runner = CountingRunner(lengths)
    outcome = Outcome()
    for _, outputs in run_to_end(scheduler, Steps(scheduler, runner, async_depth=0, step_timeout=0)):
        for output in outputs:
            if output.timings is not None:
                outcome.most_preemptions = max(outcome.most_preemptions, output.timings.num_preemptions)
    load = scheduler.load()
    outcome.steps, outcome.preemptions = load.num_steps, load.num_preemptions
    outcome.recomputed_tokens = runner.num_tokens - sum(PROMPT + length - 1 for length in lengths)
    return outcome


def rule_steps(lengths: list[int], *, is_reserved: bool, growth_blocks: int) -> int:
    """Steps of a plain rule: the head comes in when its blocks fit; the one that came last gives way; it returns first.

    `is_reserved`: blocks for all of its output, which is known, so nobody gives way. `growth_blocks`: blocks that stay
    free at an entrance for each one that runs. Prompts, and tokens computed again, cost no steps here.
    """
    waiting = deque([PROMPT, PROMPT + length] for length in lengths)
    running: list[list[int]] = []
    steps = 0
    while waiting or running:
        used = sum(_blocks(end if is_reserved else now) for now, end in running)
        while waiting and len(running) < NUM_SLOTS:
            needed = _blocks(waiting[0][1] if is_reserved else waiting[0][0])
            if running and used + needed + growth_blocks * len(running) > NUM_BLOCKS:
                break
            used += needed
            running.append(waiting.popleft())
        while not is_reserved and sum(_blocks(now + 1) for now, _ in running) > NUM_BLOCKS:
            waiting.appendleft(running.pop())
        for entry in running:
            entry[0] += 1
        running = [entry for entry in running if entry[0] < entry[1]]
        steps += 1
    return steps


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def rules(drawn: list[list[int]]) -> dict[str, int]:
    """Steps of each reference rule, over all draws."""

    def total(*, is_reserved: bool, growth_blocks: int) -> int:
        return sum(rule_steps(lengths, is_reserved=is_reserved, growth_blocks=growth_blocks) for lengths in drawn)

    return {
        "rule_exact_reservation_steps": total(is_reserved=True, growth_blocks=0),
        "rule_last_gives_way_steps": total(is_reserved=False, growth_blocks=0),
        "rule_growth_kept_free_steps": total(is_reserved=False, growth_blocks=1),
    }


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_draws, num_requests = (1, 96) if arguments.quick else (3, 256)
    drawn = [
        [rng.randint(SHORTEST, LONGEST) for _ in range(num_requests)]
        for rng in (random.Random(seed) for seed in range(num_draws))
    ]
    references = rules(drawn)
    figures: dict[str, Figure] = dict(references)
    most_steps = 0
    policies: tuple[Policy, ...] = ("fcfs", "priority")
    modes: tuple[PreemptionMode, ...] = ("recompute", "swap")
    for is_exact, policy, mode in itertools.product((True, False), policies, modes):
        outcome = Outcome()
        for lengths in drawn:
            outcome.add(simulate(lengths, is_exact=is_exact, policy=policy, mode=mode))
        name = f"{'exact' if is_exact else 'default'}_max_tokens_{policy}_{mode}"
        figures |= {
            f"{name}_steps": outcome.steps,
            f"{name}_preemptions": outcome.preemptions,
            f"{name}_most_preemptions": outcome.most_preemptions,
            f"{name}_recomputed_tokens": outcome.recomputed_tokens,
        }
        if not is_exact:
            most_steps = max(most_steps, outcome.steps)
    figures["overload_ratio_default_max_tokens"] = round(min(references.values()) / most_steps, 3)
    finish("overload", figures, quick=arguments.quick, dtype="-", threads=1)


if __name__ == "__main__":
    main()
