"""Random traffic of every kind at once, under random settings: each request gets the tokens that it gets alone."""

import random
from functools import cache

import pytest

from tests.engine.conftest import PROMPTS
from tests.engine.loop import GREEDY, Loop, make_sequence
from worker.core.outputs import LoadSnapshot
from worker.core.params import BeamParams, SamplingParams, StopConditions
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason

SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_k=20),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=4, min_p=0.05),
]
BEAMS = [BeamParams(width=2), BeamParams(width=3, length_penalty=0.5, early_stopping=True)]
EOS = frozenset({2, 5, 77})
SEEDS = (1, 2, 3, 6, 8, 10, 14, 15)
"""Of the short version: with these the cache is too small, in each of its ways."""


class Traffic:
    """Requests made from one random source, remembered by id with what they were made from."""

    def __init__(self, rnd: random.Random) -> None:
        self._rnd = rnd
        self.made: dict[int, tuple] = {}

    def arrivals(self, num_requests: int, *, beams: bool) -> list[Sequence | list[Sequence]]:
        makers = [self._single, self._single, self._group] + [self._beam] * beams
        return [self._rnd.choice(makers)(10 * (i + 1)) for i in range(num_requests)]

    def _common(self) -> tuple[int, int, frozenset[int]]:
        return (
            self._rnd.randrange(len(PROMPTS)),
            self._rnd.randint(1, 18),
            self._rnd.choice((frozenset(), EOS)),
        )

    def _make(self, id: int, kind: tuple, **more: object) -> Sequence:
        self.made[id] = kind
        return make(id, *kind, **more)

    def _single(self, id: int) -> Sequence:
        kind = (*self._common(), self._rnd.choice(SAMPLINGS), None)
        return self._make(id, kind, priority=self._rnd.randrange(3))

    def _group(self, id: int) -> list[Sequence]:
        common, size = self._common(), self._rnd.randint(2, 4)
        kinds = [(*common, SamplingParams(seed=i), None) for i in range(size)]
        return [self._make(id + i, kind, parent_id=id if i else None, index=i) for i, kind in enumerate(kinds)]

    def _beam(self, id: int) -> Sequence:
        return self._make(id, (*self._common(), GREEDY, self._rnd.choice(BEAMS)))


def make(id: int, prompt: int, max_tokens: int, eos: frozenset[int], sampling, beam, **more: object) -> Sequence:
    stop = StopConditions(max_tokens=max_tokens, eos_token_ids=eos)
    return make_sequence(id, PROMPTS[prompt], max_tokens, sampling, stop=stop, beam=beam, **more)


@pytest.fixture(scope="module")
def alone(tiny):
    """What a request gets when nothing else runs: (tokens, finish reason, hypotheses)."""

    @cache
    def run(kind: tuple) -> tuple:
        loop = tiny.loop(16)
        tokens = loop.run(make(1, *kind))[1]
        return tokens, loop.ended[1].finish_reason, loop.ended[1].hypotheses

    return run


def random_loop(tiny, rnd: random.Random, num_tokens_in_cache: int) -> Loop:
    return tiny.loop(
        rnd.choice((1, 16, 32)),
        num_tokens_in_cache=num_tokens_in_cache,
        prefix=rnd.choice(("off", "hash", "radix")),
        scheduling_policy=rnd.choice(("prefill_first", "chunked")),
        async_depth=rnd.choice((0, 1)),
        preemption_mode=rnd.choice(("recompute", "swap")),
        preemption_policy=rnd.choice(("fcfs", "priority", "shortest_remaining", "cheapest_recompute")),
        max_prefill_chunk=rnd.choice((0, 5, 16)),
        max_num_seqs=rnd.choice((4, 16)),
        watermark=rnd.choice((0.0, 0.05)),
    )


def check_one(tiny, alone, seed: int) -> LoadSnapshot:
    """Returns the load at the end."""
    rnd = random.Random(seed)
    num_tokens_in_cache = rnd.choice((96, 160, 288, 1024))
    loop, traffic = random_loop(tiny, rnd, num_tokens_in_cache), Traffic(rnd)
    # Three beams of the longest request take nine blocks of 32.
    arrivals = traffic.arrivals(12, beams=num_tokens_in_cache >= 288)

    def sometimes_abort() -> None:
        if rnd.random() < 0.05:
            loop.scheduler.abort(rnd.choice(list(loop.tokens)))

    loop.run(*arrivals, each_step=rnd.choice((0, 1, 3)), before_step=sometimes_abort)
    assert loop.ended.keys() == traffic.made.keys()
    for id, kind in traffic.made.items():
        tokens, reason, hypotheses = alone(kind)
        end = loop.ended[id]
        if end.finish_reason is FinishReason.ABORTED:
            assert loop.tokens[id] == tokens[: len(loop.tokens[id])]
            continue
        assert end.finish_reason is reason
        if hypotheses is None:
            assert loop.tokens[id] == tokens
        else:
            assert [beam.token_ids for beam in end.hypotheses] == [beam.token_ids for beam in hypotheses]
            assert [beam.score for beam in end.hypotheses] == pytest.approx(
                [beam.score for beam in hypotheses], abs=1e-4
            )
    return loop.scheduler.load()


@pytest.mark.soak
def test_every_request_gets_what_it_gets_alone(tiny, alone, is_soak):
    loads = [check_one(tiny, alone, seed) for seed in (range(1000) if is_soak else SEEDS)]
    assert sum(load.num_preemptions > 0 for load in loads) >= 5
    assert sum(load.num_swaps > 0 for load in loads) >= 3
    assert sum(load.num_evictions > 0 for load in loads) >= 5
