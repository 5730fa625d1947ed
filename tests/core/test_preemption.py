"""Who gives way, what is kept, and that it ends."""

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from worker.core.sequence import Sequence, SequenceStatus


def outputs(sequences: list[Sequence], max_model_len: int = 256) -> dict[int, list[int]]:
    return {seq.id: expected_output(seq, max_model_len)[0] for seq in sequences}


def test_last_admitted_gives_way_and_returns_to_the_front() -> None:
    engine = Engine(num_blocks=6, prefix="off")
    sequences = [make_sequence(id, 30, 30) for id in (1, 2, 3)]
    waiting = make_sequence(4, 30, 30)
    wanted = outputs([*sequences, waiting])
    engine.add(*sequences, waiting)
    for _ in range(4):
        engine.step()
    # 30 + 3 tokens: the first two have their third block, the third gave way.
    assert [seq.status for seq in sequences] == [
        SequenceStatus.RUNNING,
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
    ]
    assert (sequences[2].num_computed_tokens, sequences[2].num_generated_tokens) == (0, 3)
    engine.run()
    assert engine.tokens == wanted
    assert list(engine.ended) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("policy", "victim"),
    [("fcfs", 4), ("priority", 3), ("shortest_remaining", 2), ("cheapest_recompute", 2)],
)
def test_victim_policies(policy: str, victim: int) -> None:
    engine = Engine(num_blocks=8, prefix="off", preemption_policy=policy, max_model_len=128)
    # The senior (1) asks for a block after a while; of the others one gives way.
    sequences = [
        make_sequence(1, 14, 40),
        make_sequence(2, 17, 10),
        make_sequence(3, 20, 20, priority=2),
        make_sequence(4, 33, 30, priority=1),
    ]
    engine.add(sequences[0], sequences[1], sequences[3], sequences[2])
    if policy == "fcfs":
        sequences = [sequences[0], sequences[1], sequences[3], sequences[2]]
        victim = 4 if sequences[2].order > sequences[3].order else 3
    while not engine.scheduler.load().num_preemptions:
        engine.step()
    assert {seq.id for seq in sequences if seq.num_preemptions} == {victim}


def test_recompute_finds_its_own_blocks_again() -> None:
    engine = Engine(num_blocks=6)
    first, second = make_sequence(1, 40, 30), make_sequence(2, 40, 30)
    wanted = outputs([first, second])
    engine.add(first, second)
    while not second.num_preemptions:
        engine.step()
    num_before = len(engine.batches)
    engine.run()
    assert engine.tokens == wanted
    again = [batch for batch in engine.batches[num_before:] if batch.new_sequences]
    assert again[0].num_scheduled_tokens[0] == len(again[0].new_sequences[0].token_ids) - 16
    # They say nothing about the cache, so neither counts: not what was looked up, nor what was found.
    load = engine.scheduler.load()
    assert (load.num_prefix_queries, load.num_prefix_hits) == (80, 0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("depth", [0, 1])
def test_pool_just_too_small_for_two_causes_few_preemptions(mode: str, policy: str, depth: int) -> None:
    engine = Engine(
        num_blocks=9,
        num_host_blocks=9,
        preemption_mode=mode,
        scheduling_policy=policy,
        async_depth=depth,
        max_num_batched_tokens=32,
        max_prefill_chunk=16,
        prefix="off",
    )
    sequences = [make_sequence(1, 64, 60), make_sequence(2, 64, 60)]
    wanted = outputs(sequences)
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
    assert all(seq.num_preemptions <= 2 for seq in sequences)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_remaining", "cheapest_recompute"])
def test_preemptions_per_request_are_bounded(policy: str) -> None:
    engine = Engine(num_blocks=12, preemption_policy=policy, scheduling_policy="chunked", max_num_batched_tokens=16)
    sequences = [make_sequence(id, 10 * id % 50 + 1, 10 + 17 * id % 90, priority=id % 3) for id in range(1, 30)]
    wanted = outputs(sequences)
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
    assert max(seq.num_preemptions for seq in sequences) <= 3


def test_a_sequence_that_outgrew_the_budget_comes_back_in_chunks() -> None:
    engine = Engine(num_blocks=5, max_num_batched_tokens=32, max_num_seqs=4, prefix="off")
    sequences = [make_sequence(1, 31, 33), make_sequence(2, 31, 33)]
    wanted = outputs(sequences)
    engine.add(*sequences)
    engine.run()
    assert sequences[1].num_preemptions == 1
    assert engine.tokens == wanted


def test_swap_restores_what_was_computed() -> None:
    engine = Engine(num_blocks=6, num_host_blocks=3, preemption_mode="swap", prefix="off")
    sequences = [make_sequence(1, 40, 20), make_sequence(2, 40, 20)]
    wanted = outputs(sequences)
    engine.add(*sequences)
    while sequences[1].status is not SequenceStatus.SWAPPED:
        engine.step()
    swapped_at = engine.batches[-1]
    assert [host for _, host in swapped_at.blocks_to_swap_out] == [0, 1, 2]
    assert engine.scheduler.load().num_used_host_blocks == 3
    engine.run()
    back = next(batch for batch in engine.batches if batch.blocks_to_swap_in)
    assert [host for host, _ in back.blocks_to_swap_in] == [0, 1, 2]
    assert engine.tokens == wanted
    assert engine.runner.num_tokens == 2 * (40 + 19)
    engine.assert_drained()


def test_swapped_comes_back_before_anything_new() -> None:
    engine = Engine(num_blocks=6, num_host_blocks=3, preemption_mode="swap", prefix="off")
    sequences = [make_sequence(1, 40, 12), make_sequence(2, 40, 12), make_sequence(3, 1, 1)]
    engine.add(sequences[0], sequences[1])
    while sequences[1].status is not SequenceStatus.SWAPPED:
        engine.step()
    engine.add(sequences[2])
    num_before = len(engine.batches)
    engine.run()
    bound = [new.num_prompt_tokens for batch in engine.batches[num_before:] for new in batch.new_sequences]
    assert bound == [40, 1]


def test_full_swap_space_falls_back_to_recompute() -> None:
    engine = Engine(num_blocks=6, num_host_blocks=2, preemption_mode="swap", prefix="off")
    sequences = [make_sequence(1, 40, 20), make_sequence(2, 40, 20)]
    wanted = outputs(sequences)
    engine.add(*sequences)
    engine.run()
    load = engine.scheduler.load()
    assert (load.num_preemptions, load.num_swaps) == (1, 0)
    assert engine.tokens == wanted


def test_abort_of_a_swapped_sequence_gives_its_host_blocks_back() -> None:
    engine = Engine(num_blocks=6, num_host_blocks=3, preemption_mode="swap")
    sequences = [make_sequence(1, 40, 20), make_sequence(2, 40, 20)]
    engine.add(*sequences)
    while sequences[1].status is not SequenceStatus.SWAPPED:
        engine.step()
    assert engine.scheduler.abort(2)
    assert engine.scheduler.load().num_used_host_blocks == 0
    engine.run()
    engine.assert_drained()


@pytest.mark.parametrize("depth", [0, 1])
def test_one_that_fits_alone_always_finishes(depth: int) -> None:
    engine = Engine(num_blocks=2, async_depth=depth, prefix="off")
    sequences = [make_sequence(id, 6, 20) for id in range(1, 6)]
    wanted = outputs(sequences)
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted


def test_members_of_a_group_give_way_to_each_other() -> None:
    engine = Engine(num_blocks=4, max_num_seqs=4, max_num_batched_tokens=16, prefix="off")
    group = make_group(1, [7] * 16, 4, 4)
    wanted = outputs(group)
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
