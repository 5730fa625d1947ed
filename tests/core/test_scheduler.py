"""Who runs in which step, and how much of it: what the policy tests leave open, by exact batches."""

import pytest

from tests.core.builders import Engine, make_sequence
from tests.core.helpers import scheduled


def steps(engine: Engine, num: int) -> None:
    for _ in range(num):
        engine.step()


# Chunks.


@pytest.mark.parametrize(
    ("prompt", "budget", "chunk", "expected"),
    [
        (20, 8, 0, [[8], [8], [4]]),
        (16, 8, 0, [[8], [8]]),
        (20, 16, 5, [[5], [5], [5], [5]]),
        (8, 8, 8, [[8]]),
        (9, 8, 8, [[8], [1]]),
    ],
)
def test_prompt_is_cut_by_budget_and_chunk_limit(prompt: int, budget: int, chunk: int, expected: list) -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=budget, max_prefill_chunk=chunk)
    engine.add(make_sequence(1, prompt, 1))
    engine.run()
    assert scheduled(engine) == expected


def test_prefill_first_cuts_prompts_only_with_a_chunk_limit() -> None:
    engine = Engine(max_num_batched_tokens=8, max_prefill_chunk=8)
    engine.add(make_sequence(1, 20, 2))
    engine.run()
    assert scheduled(engine) == [[8], [8], [4], [1]]


def test_decodes_come_before_chunks_and_older_prompts_before_newer() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=16)
    engine.add(make_sequence(1, 4, 20))
    engine.step()
    engine.add(make_sequence(2, 20, 1), make_sequence(3, 20, 1))
    steps(engine, 3)
    assert scheduled(engine) == [[4], [1, 15], [1, 5, 10], [1, 10]]


def test_chunk_starts_where_the_last_one_ended() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=8)
    engine.add(make_sequence(1, 20, 1))
    engine.run()
    assert [batch.num_computed_tokens for batch in engine.batches] == [[0], [8], [16]]
    assert [list(batch.input_ids) for batch in engine.batches] == [
        list(range(1000, 1008)),
        list(range(1008, 1016)),
        list(range(1016, 1020)),
    ]


def test_blocks_of_a_chunk_suffice_for_its_admission() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=16, num_blocks=4)
    engine.add(make_sequence(1, 50, 2))
    tables = [[*engine.step().new_sequences[0].block_ids]]
    tables += [blocks for _ in range(3) for _, blocks in engine.step().new_block_ids]
    assert tables == [[0], [1], [2], [3]]


# Who goes first.


def test_arrivals_are_served_in_order() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(*(make_sequence(id, 3, 1) for id in (5, 3, 9, 1)))
    engine.run()
    assert list(engine.ended) == [5, 3, 9, 1]


def test_head_that_does_not_fit_is_not_overtaken_by_smaller_ones() -> None:
    engine = Engine(num_blocks=4)
    engine.add(make_sequence(1, 33, 10))
    engine.step()
    engine.add(make_sequence(2, 33, 1), make_sequence(3, 1, 1))
    assert engine.step().num_scheduled_tokens == [1]
    engine.run()
    assert list(engine.ended) == [1, 2, 3]


def test_urgent_latecomer_overtakes_the_queue_but_not_the_running() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_sequence(1, 3, 3, priority=5), make_sequence(2, 3, 1, priority=5))
    engine.step()
    engine.add(make_sequence(3, 3, 1, priority=-1))
    engine.run()
    assert list(engine.ended) == [1, 3, 2]


def test_least_urgent_gives_way_under_the_priority_policy() -> None:
    engine = Engine(num_blocks=6, preemption_policy="priority", prefix="off")
    sequences = [make_sequence(id, 30, 30, priority=priority) for id, priority in [(1, 1), (2, 0), (3, 0)]]
    engine.add(*sequences)
    while not engine.scheduler.load().num_preemptions:
        engine.step()
    assert [seq.num_preemptions for seq in sequences] == [1, 0, 0]


def test_equal_priorities_and_times_keep_their_order() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(*(make_sequence(id, 3, 1, priority=7) for id in (4, 2, 8, 6)))
    engine.run()
    assert list(engine.ended) == [4, 2, 8, 6]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (1, [[8], [8], [1, 1], [8], [1, 1, 1], [8]]),
        (2, [[8], [8], [8], [1, 1, 1], [8], [8]]),
        (3, [[8], [8], [8], [8], [1, 1, 1, 1], [8]]),
    ],
)
def test_decode_quota_step_by_step(quota: int, expected: list) -> None:
    engine = Engine(decode_quota=quota, max_num_batched_tokens=8)
    engine.add(*(make_sequence(id, 8, 50) for id in range(1, 8)))
    steps(engine, 6)
    assert scheduled(engine) == expected


def test_quota_does_not_count_prefills_while_nothing_decodes() -> None:
    engine = Engine(decode_quota=1, max_num_batched_tokens=8)
    engine.add(*(make_sequence(id, 8, 1) for id in range(1, 6)))
    engine.run()
    assert scheduled(engine) == [[8]] * 5


# Delay factor and watermark.


@pytest.mark.parametrize(("waited", "expected"), [(0.019, [1]), (0.02, [3])])
def test_delay_is_over_at_factor_times_the_last_prefill(waited: float, expected: list[int]) -> None:
    engine = Engine(scheduler_delay_factor=2.0)
    engine.add(make_sequence(1, 3, 10))
    engine.step()
    engine.clock.now = 0.0
    engine.add(make_sequence(2, 3, 1))
    engine.clock.now = waited
    assert engine.step().num_scheduled_tokens == expected


def test_delay_is_decided_once_for_all_that_wait() -> None:
    engine = Engine(scheduler_delay_factor=2.0)
    engine.add(make_sequence(1, 3, 10))
    engine.step()
    engine.add(make_sequence(2, 3, 1))
    engine.clock.now += 1
    engine.add(make_sequence(3, 3, 1))
    assert engine.step().num_scheduled_tokens == [3, 3]


def test_nothing_waits_without_a_delay_factor() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 3, 10))
    engine.step()
    engine.add(make_sequence(2, 3, 1))
    assert engine.scheduler.next_wakeup() is None
    assert engine.step().num_scheduled_tokens == [3]


@pytest.mark.parametrize(("prompt", "expected"), [(32, [32]), (33, [1])])
def test_watermark_is_exact(prompt: int, expected: list[int]) -> None:
    engine = Engine(num_blocks=10, watermark=0.2)
    engine.add(make_sequence(1, 90, 5))
    engine.step()
    engine.add(make_sequence(2, prompt, 5))
    assert engine.step().num_scheduled_tokens == expected, "6 blocks held; 2 of the other 4 stay free"


def test_watermark_does_not_hold_back_what_runs_alone() -> None:
    engine = Engine(num_blocks=10, watermark=0.9)
    engine.add(make_sequence(1, 150, 5))
    assert engine.step().num_scheduled_tokens == [150]
