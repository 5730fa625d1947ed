"""Beams keep their blocks while a sibling waits to come back: whoever waits beside them must not keep it out."""

import random

import pytest

from tests.core.builders import Engine, expected_hypotheses, expected_output, make_sequence
from worker.core.errors import InvalidSequenceError
from worker.core.params import BeamParams
from worker.core.sequence import Sequence

MAX_MODEL_LEN = 256


def expected(seq: Sequence) -> list[int]:
    if seq.beam is None:
        return expected_output(seq, MAX_MODEL_LEN)[0]
    return list(expected_hypotheses(seq, MAX_MODEL_LEN)[0].token_ids)


def run(engine: Engine, wanted: dict[int, list[int]]) -> None:
    engine.run()
    assert {id: list(tokens) for id, tokens in engine.tokens.items()} == wanted
    engine.assert_drained()


def test_a_swapped_sequence_does_not_keep_out_a_beam_that_stands_before_it() -> None:
    engine = Engine(num_blocks=8, num_host_blocks=8, preemption_mode="swap", scheduling_policy="chunked", prefix="off")
    sequences = [
        make_sequence(1, 19, 12, priority=1, beam=BeamParams(width=3)),
        make_sequence(2, 17, 29),
        make_sequence(3, 39, 30, priority=1),
    ]
    engine.add(*sequences)
    wanted = {seq.id: expected(seq) for seq in sequences}
    run(engine, wanted)
    assert sequences[2].num_preemptions


def test_a_search_that_waits_as_a_whole_leaves_its_slots_to_an_urgent_one() -> None:
    engine = Engine(
        num_blocks=6, max_num_seqs=3, preemption_policy="priority", scheduling_policy="chunked", prefix="off"
    )
    sequences = [
        make_sequence(1, 35, 5, priority=1),
        make_sequence(2, 38, 10, priority=1, beam=BeamParams(width=2)),
        make_sequence(3, 21, 13, beam=BeamParams(width=2)),
    ]
    wanted = {seq.id: expected(seq) for seq in sequences}
    engine.add(*sequences[:2])
    for _ in range(3):
        engine.step()
    engine.add(sequences[2])
    run(engine, wanted)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.soak
def test_searches_and_sequences_in_random_pools_all_end(mode: str, is_soak: bool) -> None:
    for seed in range(10_000 if is_soak else 50):
        rng = random.Random(seed)
        engine = Engine(
            num_blocks=rng.randint(4, 16),
            num_host_blocks=rng.randint(1, 16),
            max_num_seqs=rng.randint(3, 8),
            max_num_batched_tokens=rng.choice([16, 64]),
            max_prefill_chunk=16,
            async_depth=rng.randint(0, 1),
            prefix=rng.choice(["off", "hash"]),
            preemption_mode=mode,
            scheduling_policy=rng.choice(["prefill_first", "chunked"]),
            preemption_policy=rng.choice(["fcfs", "priority", "shortest_remaining", "cheapest_recompute"]),
        )
        wanted = {}
        for id in range(1, rng.randint(3, 9)):
            beam = BeamParams(width=rng.randint(2, 3)) if rng.random() < 0.5 else None
            seq = make_sequence(
                id, rng.randint(1, 40), rng.randint(2, 12 if beam else 30), priority=rng.randint(0, 1), beam=beam
            )
            try:
                engine.add(seq)
            except InvalidSequenceError:
                continue
            wanted[id] = expected(seq)
            for _ in range(rng.choice([0, 0, 3])):
                engine.step()
        run(engine, wanted)
