"""Few preemptions a request, in whatever pool, with whatever beside it, and no room kept for what may never come."""

import random

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from worker.core.sequence import Sequence

MAX_MODEL_LEN = 120


def random_engine(rng: random.Random, **config: object) -> Engine:
    num_blocks = rng.randint(8, 24)
    return Engine(
        num_blocks=num_blocks,
        num_host_blocks=rng.randint(1, 2 * num_blocks),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.randint(2, 12),
        max_num_batched_tokens=rng.choice([16, 64]),
        max_prefill_chunk=rng.choice([0, 16]) if config["scheduling_policy"] == "chunked" else 16,
        prefix=rng.choice(["off", "hash", "radix"]),
        watermark=rng.choice([0.0, 0.1]),
        async_depth=rng.randint(0, 1),
        **config,
    )


def random_requests(rng: random.Random) -> list[list[Sequence]]:
    """Single ones and groups, of any length and urgency; at times all from one prompt."""
    shared = rng.random() < 0.3
    requests: list[list[Sequence]] = []
    next_id = 1
    for _ in range(rng.randint(4, 16)):
        prompt = list(range(rng.randint(1, 50))) if shared else rng.randint(1, 50)
        max_tokens = rng.randint(1, 70)
        if rng.random() < 0.1:
            requests.append(make_group(next_id, prompt, 2, max_tokens))
        else:
            requests.append([make_sequence(next_id, prompt, max_tokens, priority=rng.randint(-1, 1))])
        next_id += 2
    return requests


@pytest.mark.parametrize("victims", ["fcfs", "priority", "shortest_remaining", "cheapest_recompute"])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.soak
def test_preemptions_are_bounded_in_random_pools(mode: str, policy: str, victims: str, is_soak: bool) -> None:
    for seed in range(1000 if is_soak else 5):
        rng = random.Random(seed)
        engine = random_engine(rng, preemption_mode=mode, scheduling_policy=policy, preemption_policy=victims)
        requests = random_requests(rng)
        sequences = [seq for request in requests for seq in request]
        wanted = {seq.id: expected_output(seq, MAX_MODEL_LEN)[0] for seq in sequences}
        for request in requests:
            engine.scheduler.add_group(request) if len(request) > 1 else engine.add(*request)
            for _ in range(rng.choice([0, 0, 1, 20])):
                engine.step()
        engine.run()
        assert engine.tokens == wanted, seed
        assert max(seq.num_preemptions for seq in sequences) <= (4 if is_soak else 3), seed
        engine.assert_drained()


@pytest.mark.parametrize("victims", ["fcfs", "priority", "cheapest_recompute"])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_limit_that_nobody_reaches_costs_nothing(mode: str, policy: str, victims: str) -> None:
    """As many steps with the context for a limit as with the length for one."""

    def run(*, is_exact: bool) -> Engine:
        engine = Engine(
            num_blocks=24,
            num_host_blocks=24,
            max_model_len=384,
            max_num_seqs=16,
            max_num_batched_tokens=384,
            preemption_mode=mode,
            scheduling_policy=policy,
            preemption_policy=victims,
            prefix="off",
        )
        for id in range(1, 33):
            seq = make_sequence(id, 10, 374, eos=(0,), min_tokens=20 + 37 * id % 60, priority=id % 3)
            length = len(expected_output(seq, 384)[0])
            if is_exact:
                seq = make_sequence(id, 10, length, eos=(0,), min_tokens=seq.stop.min_tokens, priority=id % 3)
            engine.add(seq)
        engine.run()
        return engine

    known, unknown = run(is_exact=True), run(is_exact=False)
    assert unknown.tokens == known.tokens
    num_steps = (len(unknown.batches), len(known.batches))
    assert num_steps[0] == num_steps[1]
