"""The core alone on one core: cost of a decode step, and of finding a cached prefix."""

import statistics
import time

from bench import core_cost
from bench.common import finish, median, parse_arguments
from common.block_hash import default_hasher
from common.garbage import freeze_loaded
from worker.core.batch import BatchOutput
from worker.core.block_chain import BlockChain
from worker.core.cache.block_manager import build_index
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence

PROMPT = 128
LOOKUP_TOKENS = 4096
NUM_SHARING = 256
NUM_SHARED_TOKENS = 4000
NUM_OWN_TOKENS = 20
BLOCK_SIZE = 16
NUM_BLOCKS = 131_072


def make_sequence(id: int, max_tokens: int) -> Sequence:
    tokens = [(id * 7919 + at) % 50_000 for at in range(PROMPT)]
    stop = StopConditions(max_tokens=max_tokens, eos_token_ids=frozenset({50_001}))
    return Sequence(id=id, token_ids=tokens, num_prompt_tokens=PROMPT, stop=stop, sampling=SamplingParams())


def make_scheduler(num_seqs: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_model_len=8192, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * PROMPT),
        CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
    )


def decode_step_ms(num_decoding: int, num_waiting: int, num_steps: int) -> list[float]:
    """`schedule` + `postprocess` of each step, asynchronous, prefix caching on; outputs are taken as well."""
    scheduler = make_scheduler(num_decoding)
    for id in range(num_decoding + num_waiting):
        scheduler.add(make_sequence(id, max_tokens=num_steps + 100))
    previous = scheduler.schedule()
    assert previous is not None and len(previous.slots) == num_decoding
    times = []
    for _ in range(num_steps):
        tokens = [[token % 50_000] for token in range(previous.step, previous.step + num_decoding)]
        output = BatchOutput(step=previous.step, token_ids=tokens)
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduler.postprocess(previous, output)
        scheduler.take_outputs()
        times.append((time.perf_counter() - start) * 1000)
        assert batch is not None and len(batch.slots) == num_decoding
        previous = batch
    return times[5:]


def admit_ms(num_seqs: int, num_repeats: int) -> float:
    """Median time of the `schedule` that admits `num_seqs` at once."""
    times = []
    for _ in range(num_repeats):
        scheduler = make_scheduler(num_seqs)
        for id in range(num_seqs):
            scheduler.add(make_sequence(id, max_tokens=100))
        start = time.perf_counter()
        batch = scheduler.schedule()
        times.append((time.perf_counter() - start) * 1000)
        assert batch is not None and len(batch.slots) == num_seqs
    return statistics.median(times)


def shared_prefix_tokens_ratio() -> float:
    """Tokens computed for requests that come at once and begin alike, over those that must be."""
    scheduler = make_scheduler(NUM_SHARING)
    shared = list(range(NUM_SHARED_TOKENS))
    for id in range(NUM_SHARING):
        tokens = shared + [(id * 7919 + at) % 50_000 for at in range(NUM_OWN_TOKENS)]
        stop = StopConditions(max_tokens=1)
        scheduler.add(Sequence(id=id, token_ids=tokens, num_prompt_tokens=len(tokens), stop=stop))
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        assert batch is not None
        rows = [[0] if samples else [] for samples in batch.samples]
        scheduler.postprocess(batch, BatchOutput(step=batch.step, token_ids=rows))
    ideal = NUM_SHARED_TOKENS + NUM_SHARING * NUM_OWN_TOKENS
    return scheduler.load().num_scheduled_tokens / ideal


def lookup_ms(kind: str, num_repeats: int) -> float:
    """Median time to find a fully cached prompt that was never seen as a sequence: packing and hashing included."""
    index = build_index(CacheConfig(num_blocks=1024, block_size=BLOCK_SIZE, prefix_index=kind))
    assert index is not None
    tokens = list(range(LOOKUP_TOKENS))
    num_blocks = LOOKUP_TOKENS // BLOCK_SIZE
    chain = BlockChain(BLOCK_SIZE, b"", default_hasher)
    chain.extend(tokens)
    index.publish(chain, list(range(num_blocks)), 0, num_blocks, None)
    times = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        fresh = BlockChain(BLOCK_SIZE, b"", default_hasher)
        fresh.extend(tokens)
        blocks, _ = index.match(fresh, num_blocks)
        times.append(time.perf_counter() - start)
        assert len(blocks) == num_blocks
    return statistics.median(times) * 1000


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_steps = 50 if arguments.quick else 600
    freeze_loaded()  # as a worker does
    steps_1024 = decode_step_ms(1024, 0, num_steps)
    figures = {
        "schedule_postprocess_ms_256": median(decode_step_ms(256, 0, num_steps), 3),
        "schedule_postprocess_ms_256_waiting_10000": median(decode_step_ms(256, 10_000, num_steps), 3),
        "schedule_postprocess_ms_1024": median(steps_1024, 3),
        "schedule_postprocess_ms_1024_p99": round(statistics.quantiles(steps_1024, n=100)[98], 3),
        "admit_1024_ms": round(admit_ms(1024, 3 if arguments.quick else 20), 2),
        "shared_prefix_tokens_ratio": round(shared_prefix_tokens_ratio(), 3),
        "prefix_lookup_ms_4096_hash": round(lookup_ms("hash", num_steps), 3),
        "prefix_lookup_ms_4096_radix": round(lookup_ms("radix", num_steps), 3),
    }
    figures |= core_cost.figures(quick=arguments.quick)
    finish("scheduler", figures, quick=arguments.quick, dtype="-", threads=1)


if __name__ == "__main__":
    main()
