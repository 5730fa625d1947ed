"""Long runs: nothing grows."""

import gc
import tracemalloc

import pytest

from tests.core.builders import make_sequence
from worker.core.batch import BatchOutput
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.scheduler import Scheduler

MAX_GROWTH_BYTES = 100_000
"""Of containers that have found their size; of many requests each may leave less."""


def num_bytes_of_the_core() -> int:
    """Allocated since tracing began and still in use; other threads of the process do not count."""
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/{room}/*") for room in ("worker/core", "tests/core")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)


@pytest.mark.soak
def test_short_requests_leave_nothing_behind(is_soak: bool) -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64, max_num_seqs=64, max_num_batched_tokens=1024), CacheConfig(num_blocks=256)
    )

    def serve(first_id: int, num_requests: int) -> None:
        for start in range(first_id, first_id + num_requests, 50):
            for id in range(start, start + 50):
                scheduler.add(make_sequence(id, [id % 97] * 20, 1 + id % 2, deadline=1e12 if id % 3 else None))
            scheduler.abort(start + 7)
            while scheduler.has_unfinished():
                batch = scheduler.schedule()
                tokens = [[1] if sampled else [] for sampled in batch.samples]
                scheduler.postprocess(batch, BatchOutput(step=batch.step, token_ids=tokens))
            assert len(scheduler.take_outputs()) >= 50

    serve(0, 2_000)
    tracemalloc.start()
    before = num_bytes_of_the_core()
    num_requests = 200_000 if is_soak else 6_000
    serve(2_000, num_requests)
    after = num_bytes_of_the_core()
    tracemalloc.stop()
    assert after - before < max(5 * num_requests, MAX_GROWTH_BYTES)
    scheduler.check_integrity()
    load = scheduler.load()
    assert (load.num_free_blocks, load.num_waiting) == (256, 0)
    state = scheduler._state
    assert not (state.sequences or state.groups.num_parked or state.outputs or len(state.deadlines))
