"""The core alone on one core: cost of a decode step, and of finding a cached prefix."""

import statistics
import time

from bench.common import finish, parse_arguments
from common.block_hash import default_hasher
from worker.core.batch import BatchOutput
from worker.core.block_chain import BlockChain
from worker.core.block_manager import build_index
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.params import SamplingParams, StopConditions
from worker.core.scheduler import Scheduler
from worker.core.sequence import Sequence

NUM_DECODING = 256
PROMPT = 128
LOOKUP_TOKENS = 4096
BLOCK_SIZE = 16


def make_sequence(id: int, max_tokens: int) -> Sequence:
    tokens = [(id * 7919 + at) % 50_000 for at in range(PROMPT)]
    stop = StopConditions(max_tokens=max_tokens, eos_token_ids=frozenset({50_001}))
    return Sequence(id=id, token_ids=tokens, num_prompt_tokens=PROMPT, stop=stop, sampling=SamplingParams())


def decode_step_ms(num_waiting: int, num_steps: int) -> float:
    """Median over steps of `schedule` + `postprocess`, asynchronous, prefix caching on; outputs are taken as well."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=8192, max_num_seqs=NUM_DECODING, max_num_batched_tokens=NUM_DECODING * PROMPT),
        CacheConfig(num_blocks=NUM_DECODING * 512, block_size=BLOCK_SIZE),
    )
    for id in range(NUM_DECODING + num_waiting):
        scheduler.add(make_sequence(id, max_tokens=num_steps + 100))
    previous = scheduler.schedule()
    assert previous is not None and len(previous.slots) == NUM_DECODING
    times = []
    for _ in range(num_steps):
        tokens = [[token % 50_000] for token in range(previous.step, previous.step + NUM_DECODING)]
        output = BatchOutput(step=previous.step, token_ids=tokens)
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduler.postprocess(previous, output)
        scheduler.take_outputs()
        times.append(time.perf_counter() - start)
        assert batch is not None and len(batch.slots) == NUM_DECODING
        previous = batch
    return statistics.median(times[5:]) * 1000


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
    num_waiting = 10_000
    figures = {
        "schedule_postprocess_ms_256": round(decode_step_ms(0, num_steps), 3),
        "schedule_postprocess_ms_256_waiting_10000": round(decode_step_ms(num_waiting, num_steps), 3),
        "prefix_lookup_ms_4096_hash": round(lookup_ms("hash", num_steps), 3),
        "prefix_lookup_ms_4096_radix": round(lookup_ms("radix", num_steps), 3),
    }
    finish("scheduler", figures, quick=arguments.quick, dtype="-", threads=1)


if __name__ == "__main__":
    main()
