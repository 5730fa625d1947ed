"""What `load` says is what is there: every number against a recount, at every step."""

import pytest

from tests.core.builders import Engine, make_group, make_sequence
from worker.core.params import BeamParams
from worker.core.sequence import Sequence, SequenceStatus
from worker.core.stopping import FinishReason


def recount(sequences: list[Sequence], status: SequenceStatus) -> int:
    return sum(seq.status is status for seq in sequences)


def assert_counts(engine: Engine, sequences: list[Sequence]) -> None:
    load = engine.scheduler.load()
    running = [seq for seq in sequences if seq.status is SequenceStatus.RUNNING]
    assert load.num_running == len(running)
    assert load.num_waiting == recount(sequences, SequenceStatus.WAITING)
    assert load.num_swapped == recount(sequences, SequenceStatus.SWAPPED)
    held = {block for seq in running for block in seq.block_table}
    pool = engine.scheduler._blocks.pool
    used = {block for block in range(load.num_blocks) if pool.ref_count(block)}
    assert held <= used
    assert (load.num_used_blocks, load.num_free_blocks) == (len(used), load.num_blocks - len(used))
    if not engine.num_in_flight:
        assert held == used
    assert load.num_used_host_blocks == sum(len(seq.host_block_table) for seq in sequences)
    assert load.num_steps == len(engine.batches)
    assert load.num_scheduled_tokens == sum(batch.num_tokens for batch in engine.batches)
    assert load.num_finished == sum(seq.is_ended for seq in sequences)
    assert load.num_preemptions == sum(seq.num_preemptions for seq in sequences)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_counters_equal_a_recount_at_every_step(depth: int, policy: str, mode: str) -> None:
    engine = Engine(
        num_blocks=12,
        num_host_blocks=6,
        preemption_mode=mode,
        scheduling_policy=policy,
        async_depth=depth,
        max_num_batched_tokens=64,
    )
    sequences = [make_sequence(id, 7 * id % 50 + 1, 11 * id % 60 + 1) for id in range(1, 16)]
    engine.add(*sequences)
    step = 0
    while engine.scheduler.has_unfinished() or engine.num_in_flight:
        engine.step()
        step += 1
        if step == 9:
            engine.scheduler.abort(15)
            engine.check()
        assert_counts(engine, sequences)
    load = engine.scheduler.load()
    assert load.num_preemptions > 0
    assert (load.num_swaps > 0) is (mode == "swap")


@pytest.mark.parametrize("depth", [0, 1])
def test_members_of_a_group_wait_until_they_run(depth: int) -> None:
    engine = Engine(async_depth=depth, scheduling_policy="chunked", max_num_batched_tokens=16)
    group = make_group(1, 40, 4, 6)
    engine.scheduler.add_group(group)
    while engine.scheduler.has_unfinished() or engine.num_in_flight:
        assert_counts(engine, group)
        engine.step()
    assert_counts(engine, group)


def test_waiting_tokens_are_those_of_the_queue() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_sequence(1, 10, 2), make_sequence(2, 20, 2), make_sequence(3, 30, 2))
    counts = [engine.scheduler.load().num_waiting_tokens]
    engine.step()
    counts.append(engine.scheduler.load().num_waiting_tokens)
    engine.scheduler.abort(2)
    counts.append(engine.scheduler.load().num_waiting_tokens)
    engine.run()
    counts.append(engine.scheduler.load().num_waiting_tokens)
    assert counts == [60, 50, 30, 0]


def test_sampled_tokens_are_those_that_arrived() -> None:
    engine = Engine()
    engine.add(*(make_sequence(id, 5, id) for id in (1, 2, 3)))
    engine.run()
    assert engine.scheduler.load().num_generated_tokens == 1 + 2 + 3


def test_tokens_scheduled_at_known_limits_are_prompt_and_output_less_one() -> None:
    engine = Engine(async_depth=1)
    engine.add(*(make_sequence(id, 5, id) for id in (1, 2, 3)))
    engine.run()
    assert engine.scheduler.load().num_scheduled_tokens == (5 + 0) + (5 + 1) + (5 + 2)


def test_cached_blocks_are_free_blocks_with_content() -> None:
    engine = Engine(num_blocks=10)
    engine.add(make_sequence(1, 40, 1))
    engine.run()
    load = engine.scheduler.load()
    assert (load.num_used_blocks, load.num_free_blocks, load.num_cached_blocks) == (0, 10, 2)


def test_abort_counts_as_finished() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5), make_sequence(2, 5))
    engine.scheduler.abort(1)
    engine.scheduler.abort(2, FinishReason.DEADLINE)
    assert engine.scheduler.load().num_finished == 2


def test_beams_are_counted_while_they_run_and_gone_after() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 20, 5, beam=BeamParams(width=3)))
    engine.step()
    assert engine.scheduler.load().num_running == 3
    engine.run()
    engine.assert_drained()
    assert engine.scheduler.load().num_finished == 1


def test_state_groups_are_held_while_their_sequences_run() -> None:
    engine = Engine(num_groups=8, prefix="off")
    engine.add(make_sequence(1, 20, 5), make_sequence(2, 20, 5))
    engine.step()
    load = engine.scheduler.load()
    assert (load.num_groups, load.num_used_groups) == (8, 2)
    engine.run()
    assert engine.scheduler.load().num_used_groups == 0


def test_idle_scheduler_that_never_ran_has_no_load() -> None:
    load = Engine(num_blocks=7).scheduler.load()._asdict()
    assert {name: value for name, value in load.items() if value} == {"num_blocks": 7, "num_free_blocks": 7}
