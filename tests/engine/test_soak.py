"""Very many short requests on the tiny model: memory is flat, and every container is what it was before."""

import gc
from collections import deque
from collections.abc import Iterator
from itertools import cycle

import psutil
import pytest

from tests.engine.conftest import PROMPTS
from tests.engine.loop import Loop, make_sequence
from worker.core.params import BeamParams, SamplingParams
from worker.core.sequence import Sequence

ROUND = 40
MAX_GROWTH_BYTES = 4 * 1024 * 1024
"""Of a process in which other tests have run; of many requests each may leave less."""


def arrivals(first_id: int) -> Iterator[Sequence | list[Sequence]]:
    """Requests of every kind. Prompts just fill two blocks, one shared by all: sequences grow out of what is left."""
    for id in range(first_id, first_id + ROUND):
        prompt = [*PROMPTS[3][:16], id % 131, *PROMPTS[3][:15]]
        num_tokens, sampling = 1 + id % 3, SamplingParams(seed=id)
        if id % ROUND == 5:
            yield make_sequence(id, prompt, num_tokens, beam=BeamParams(width=2))
        elif id % ROUND == 10:
            other = make_sequence(-id, prompt, num_tokens, SamplingParams(seed=0), parent_id=id, index=1)
            yield [make_sequence(id, prompt, num_tokens, sampling), other]
        else:
            yield make_sequence(id, prompt, num_tokens, sampling, deadline=1e12 if id % 2 else None)


def serve(loop: Loop, first_id: int, num_requests: int) -> None:
    """In rounds; some are aborted while they wait or run, by ids that may have ended before."""
    abort = loop.scheduler.abort
    for start in range(first_id, first_id + num_requests, ROUND):
        loop.run(*arrivals(start), before_step=map(abort, cycle((start + 3, start + 10, start + 30))).__next__)
        loop.tokens.clear()
        loop.ended.clear()


def sizes(root: object) -> dict[str, int]:
    """Length of every container that our own objects hold, by path."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def visit(value: object, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict | list | set | deque):
            found[path] = len(value)
            children = list(value.values()) if isinstance(value, dict) else list(value)
            for child in children:
                visit(child, f"{path}[]")
        elif type(value).__module__.startswith("worker."):
            names = [name for base in type(value).__mro__ for name in base.__dict__.get("__slots__", ())]
            for name in {*names, *getattr(value, "__dict__", ())}:
                visit(getattr(value, name), f"{path}.{name}")

    visit(root, "scheduler")
    return found


def settle(loop: Loop) -> tuple[dict[str, int], int]:
    """Sizes of all containers and resident bytes, with nothing cached."""
    loop.scheduler.clear_prefix_cache()
    gc.collect()
    lengths = sizes(loop.scheduler)
    # Heaps keep up to 64 dead entries of a key and an id.
    assert all(lengths.pop(name) <= 64 for name in list(lengths) if name.endswith("._heap"))
    return lengths, psutil.Process().memory_info().rss


@pytest.mark.soak
@pytest.mark.parametrize(("prefix", "mode"), [("hash", "swap"), ("radix", "recompute")])
def test_short_requests_leave_nothing_behind(tiny, is_soak, prefix, mode):
    """Cases 61 and 62."""
    num_requests = 100_000 if is_soak else 1_200
    loop = tiny.loop(16, num_tokens_in_cache=384, prefix=prefix, preemption_mode=mode, async_depth=1, watermark=0.0)
    serve(loop, 1_000, 400)
    lengths, resident = settle(loop)
    serve(loop, 10_000, num_requests)
    lengths_after, resident_after = settle(loop)
    assert lengths_after == lengths
    assert resident_after - resident < max(1000 * num_requests, MAX_GROWTH_BYTES)
    load = loop.scheduler.load()
    assert load.num_preemptions > 0
    assert load.num_prefix_hits > 0
    assert (load.num_swaps > 0) == (mode == "swap")
