"""What tokens, blocks and stop rules cost `worker/core` at sizes that would hurt. Part of `make bench-scheduler`."""

import statistics
import time
import tracemalloc

from common.block_hash import default_hasher
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.core.block_chain import BlockChain
from worker.core.cache.block_manager import build_index
from worker.core.cache.block_pool import BlockPool
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence
from worker.core.stopping import find_stop
from worker.core.tokens import token_array

BLOCK_SIZE = 16
PROMPT = 4000
NUM_RUNNING = 1024
NUM_WAITING = 10_000
EVICTED_TOKENS = 100_000


def make_sequence(id: int) -> Sequence:
    stop = StopConditions(max_tokens=4000, eos_token_ids=frozenset({50_001}))
    return Sequence(
        id=id, token_ids=range(id, id + PROMPT), num_prompt_tokens=PROMPT, stop=stop, sampling=SamplingParams()
    )


def make_scheduler(num_seqs: int, num_blocks: int) -> Scheduler:
    config = SchedulerConfig(max_model_len=8192, max_num_seqs=num_seqs, max_num_batched_tokens=16384, max_num_waiting=0)
    return Scheduler(config, CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))


def bytes_per_token_waiting(num_waiting: int) -> float:
    """Memory of queued prompts of 4,000 tokens, all that the core keeps of them."""
    scheduler = make_scheduler(1, 512)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for id in range(num_waiting):
        scheduler.add(make_sequence(id))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (num_waiting * PROMPT)


def engine_pause_ms_max(num_running: int, num_waiting: int, num_steps: int) -> float:
    """Longest turn of the engine's thread in `num_steps` asynchronous decode steps, as its own CPU time.

    A turn is all that the host does for a step, garbage collection included, under the worker's settings for that
    (`freeze_loaded`).
    """
    scheduler = make_scheduler(num_running, num_running * 512)
    for id in range(num_running):
        scheduler.add(make_sequence(id))
    pending = scheduler.schedule()
    assert pending is not None
    while scheduler.load().num_waiting or len(pending.slots) < num_running:
        pending = _turn(scheduler, pending)
    for id in range(num_running, num_running + num_waiting):
        scheduler.add(make_sequence(id))
    longest = 0.0
    for _ in range(num_steps):
        start = time.thread_time()
        pending = _turn(scheduler, pending)
        longest = max(longest, time.thread_time() - start)
        assert len(pending.slots) == num_running
    return longest * 1000


def _turn(scheduler: Scheduler, pending: ScheduledBatch) -> ScheduledBatch:
    """The next step is scheduled, then `pending` comes back."""
    batch = scheduler.schedule()
    tokens = [[(pending.step + row) % 50_000] if samples else [] for row, samples in enumerate(pending.samples)]
    scheduler.postprocess(pending, BatchOutput(step=pending.step, token_ids=tokens))
    scheduler.take_outputs()
    assert batch is not None
    return batch


def evict_ms(kind: str, num_repeats: int) -> float:
    """Median time to take all blocks of a pool that is full of one cached chain."""
    num_blocks = EVICTED_TOKENS // BLOCK_SIZE
    times = []
    for _ in range(num_repeats):
        index = build_index(CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_index=kind))
        assert index is not None
        pool = BlockPool(num_blocks, index)
        chain = BlockChain(BLOCK_SIZE, b"", default_hasher)
        chain.extend(range(EVICTED_TOKENS))
        table = pool.take(num_blocks)
        index.publish(chain, table, 0, num_blocks, None)
        pool.give(reversed(table))
        start = time.perf_counter()
        pool.take(num_blocks)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def stop_sequences_ms(num_repeats: int) -> float:
    """Median time of the stop rule in 256 rows with 64 stop sequences of 256 tokens each.

    All of them end in the token that comes, and all but one of their tokens are those of the text.
    """
    sequences = tuple((*([7] * 254), 1000 + at, 7) for at in range(64))
    stop = StopConditions(max_tokens=4000, stop_token_sequences=sequences)
    rows = [token_array([7] * PROMPT) for _ in range(256)]
    times = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        for row in rows:
            find_stop(row, [7], 10, stop, 8192)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def figures(*, quick: bool) -> dict[str, float]:
    """All of them; call `freeze_loaded` before."""
    return {
        "evict_100k_tokens_ms_hash": round(evict_ms("hash", 3 if quick else 20), 2),
        "evict_100k_tokens_ms_radix": round(evict_ms("radix", 3 if quick else 20), 2),
        "stop_sequences_ms_256": round(stop_sequences_ms(10 if quick else 200), 3),
        "bytes_per_token_waiting": round(bytes_per_token_waiting(100 if quick else 1000), 2),
        "engine_pause_ms_max": round(
            engine_pause_ms_max(64, 100, 50) if quick else engine_pause_ms_max(NUM_RUNNING, NUM_WAITING, 1000), 2
        ),
    }
