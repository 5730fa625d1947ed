"""Hash chain against radix tree on a trace of shared prefixes: look-up cost, hit rate, memory.

The trace: conversations that grow turn by turn on one of a few system prompts, interleaved, against a pool too small to
keep them all. No scheduler: match, take, publish, give, as it would.
"""

import random
import statistics
import time
import tracemalloc

from bench.common import finish, parse_arguments
from common.block_hash import default_hasher
from worker.core.block_chain import BlockChain
from worker.core.cache.block_manager import build_index
from worker.core.cache.block_pool import BlockPool
from worker.core.cache.prefix_index import PrefixIndex
from worker.core.config import CacheConfig

BLOCK_SIZE = 16
NUM_BLOCKS = 8192
SYSTEM_TOKENS = 1024
TURN_TOKENS = 160
NUM_SYSTEMS = 4


def trace(num_requests: int) -> list[list[int]]:
    """Prompts in order of arrival."""
    rnd = random.Random(1)
    systems = [[rnd.randrange(50_000) for _ in range(SYSTEM_TOKENS)] for _ in range(NUM_SYSTEMS)]
    conversations = [list(rnd.choice(systems)) for _ in range(num_requests // 8)]
    prompts = []
    for _ in range(num_requests):
        conversation = conversations[int(rnd.triangular(0, len(conversations), len(conversations) // 2))]
        conversation += [rnd.randrange(50_000) for _ in range(TURN_TOKENS)]
        prompts.append(list(conversation))
    return prompts


def replay(kind: str, prompts: list[list[int]]) -> dict[str, float]:
    """Figures of one index, named without its kind. Memory has a run of its own: tracing it costs time."""
    tracemalloc.start()
    index, _ = _replay_once(kind, prompts)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del index
    _, figures = _replay_once(kind, prompts)
    return figures | {"bytes_per_block": round(num_bytes / NUM_BLOCKS, 1)}


def _replay_once(kind: str, prompts: list[list[int]]) -> tuple[PrefixIndex, dict[str, float]]:
    index = build_index(CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefix_index=kind))
    assert index is not None
    pool = BlockPool(NUM_BLOCKS, index)
    lookups, publishes = [], []
    num_tokens = num_hits = 0
    for tokens in prompts:
        chain = BlockChain(BLOCK_SIZE, b"", default_hasher)
        num_full = len(tokens) // BLOCK_SIZE
        start = time.perf_counter()
        chain.extend(tokens)
        hits, anchor = index.match(chain, (len(tokens) - 1) // BLOCK_SIZE)
        lookups.append(time.perf_counter() - start)
        pool.share(hits)
        table = hits + pool.take(num_full - len(hits))
        start = time.perf_counter()
        index.publish(chain, table, len(hits), num_full, anchor)
        publishes.append(time.perf_counter() - start)
        pool.give(reversed(table))
        num_tokens += len(tokens)
        num_hits += len(hits) * BLOCK_SIZE
    return index, {
        "lookup_ms": round(statistics.mean(lookups) * 1000, 4),
        "publish_ms": round(statistics.mean(publishes) * 1000, 4),
        "hit_rate": round(num_hits / num_tokens, 4),
    }


def main() -> None:
    arguments = parse_arguments(__doc__)
    prompts = trace(400 if arguments.quick else 4000)
    figures = {f"{name}_{kind}": value for kind in ("hash", "radix") for name, value in replay(kind, prompts).items()}
    finish("prefix_index", figures, quick=arguments.quick, dtype="-", threads=1)


if __name__ == "__main__":
    main()
