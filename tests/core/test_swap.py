"""Copies between device and host: whoever owns a block keeps it until the copy that reads it was made."""

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from worker.core.scheduling.batch_builder import BatchBuilder
from worker.core.sequence import Sequence, SequenceStatus

SWAP = {"preemption_mode": "swap", "prefix": "off"}


def wanted(*sequences: Sequence) -> dict[int, list[int]]:
    return {seq.id: expected_output(seq, 256)[0] for seq in sequences}


def test_host_blocks_of_a_swap_in_are_not_given_out_in_the_same_step() -> None:
    """Copies out come first: they would overwrite what is to be copied in."""
    engine = Engine(num_blocks=4, num_host_blocks=2, scheduling_policy="chunked", max_prefill_chunk=16, **SWAP)
    sequences = [make_sequence(1, 20, 6), make_sequence(2, 40, 2), make_sequence(3, 40, 2)]
    tokens = wanted(*sequences)
    engine.add(sequences[0])
    engine.step()
    engine.step()
    engine.add(*sequences[1:])
    engine.step()
    assert [seq.num_computed_tokens for seq in sequences] == [21, 16, 16]
    engine.scheduler._state.preempt(sequences[0])
    batch = engine.step()
    assert [host for host, _ in batch.blocks_to_swap_in] == [0, 1]
    assert [host for _, host in batch.blocks_to_swap_out] == [0, 1]
    assert sequences[2].status is SequenceStatus.WAITING, "and has no host blocks: there are two"
    engine.run()
    assert engine.tokens == tokens


def test_copy_out_that_waits_for_a_step_ends_with_its_sequence() -> None:
    """Its host block may belong to another one by then."""
    engine = Engine(num_blocks=8, num_host_blocks=2, **SWAP)
    sequences = [make_sequence(1, 20, 6), make_sequence(2, 20, 6)]
    tokens = wanted(*sequences)
    engine.add(*sequences)
    engine.step()
    engine.scheduler._state.preempt(sequences[0])
    assert engine.scheduler.abort(1)
    engine.scheduler._state.preempt(sequences[1])
    batch = engine.step()
    assert sorted(host for _, host in batch.blocks_to_swap_out) == [0, 1]
    engine.run()
    assert engine.tokens[2] == tokens[2]
    engine.assert_drained()


def test_swapped_sequence_stays_away_while_a_token_of_it_is_in_flight() -> None:
    engine = Engine(num_blocks=8, num_host_blocks=4, async_depth=1, **SWAP)
    sequences = [make_sequence(1, 20, 6), make_sequence(2, 20, 6)]
    tokens = wanted(*sequences)
    engine.add(*sequences)
    engine.submit()
    engine.scheduler._state.preempt(sequences[1])
    batch = engine.submit()
    assert (batch.slots, batch.blocks_to_swap_in) == ([0], [])
    engine.retire()
    engine.run()
    assert engine.tokens == tokens


@pytest.mark.parametrize("secure", [False, True])
def test_source_of_a_copy_stays_held_until_the_step_is_complete(secure: bool) -> None:
    """A block that is cleared or copied into in the same step would lose its content before it is read."""
    engine = Engine(num_blocks=8, secure=secure, prefix="off")
    group = make_group(1, 20, 2, 4)
    engine.scheduler.add_group(group)
    engine.step()
    planner, builder = engine.scheduler._planner, BatchBuilder(1, 64)
    source = group[0].block_table[1]
    engine.scheduler._blocks.fork(group[0], group[1], 20)
    planner._room.copy_on_write(group[1], 1, builder)
    engine.scheduler._state.preempt(group[0])
    assert builder.pinned_blocks == [source]
    assert source not in engine.scheduler._blocks.pool.take(engine.scheduler._blocks.pool.num_free)


def swapped_beside(prompt: int, depth: int, **config: object) -> tuple[Engine, Sequence, Sequence]:
    """A junior that waits in host memory, with two blocks, and a senior that has begun and holds one of the three."""
    engine = Engine(num_blocks=3, num_host_blocks=2, preemption_policy="priority", async_depth=depth, **SWAP, **config)
    senior, junior = make_sequence(1, prompt, 6), make_sequence(2, 20, 6, priority=1)
    engine.add(junior)
    while not junior.num_generated_tokens:
        engine.submit()
        engine.retire()
    engine.scheduler._state.preempt(junior)
    engine.add(senior)
    assert engine.step().slots == [senior.slot]
    return engine, senior, junior


@pytest.mark.parametrize("depth", [0, 1])
def test_who_comes_back_in_a_step_does_not_give_way_in_it(depth: int) -> None:
    """Copies out come before copies in, and its row would stay."""
    config = {"scheduling_policy": "chunked", "max_prefill_chunk": 16}
    engine, _senior, junior = swapped_beside(40, depth, **config)
    batch = engine.step()
    assert (batch.slots, batch.blocks_to_swap_out) == ([junior.slot], []), "no block for the senior's next chunk"
    assert [host for host, _ in batch.blocks_to_swap_in] == [0, 1]
    engine.run()
    assert engine.tokens == wanted(make_sequence(1, 40, 6), make_sequence(2, 20, 6))
    engine.assert_drained()


@pytest.mark.parametrize("depth", [0, 1])
def test_who_came_back_may_give_way_in_the_next_step(depth: int) -> None:
    """Be the copy in still in flight: the copy out comes after it, and its blocks stay its own until then."""
    engine, senior, junior = swapped_beside(15, depth)
    batch = engine.step()
    assert batch.slots == [senior.slot, junior.slot]
    brought_back = [device for _, device in batch.blocks_to_swap_in]
    assert junior.status is SequenceStatus.RUNNING
    batch = engine.step() or engine.step()
    assert (batch.slots, junior.status) == ([senior.slot], SequenceStatus.SWAPPED)
    assert [device for device, _ in batch.blocks_to_swap_out] == brought_back
    engine.run()
    assert engine.tokens == wanted(make_sequence(1, 15, 6), make_sequence(2, 20, 6))
    engine.assert_drained()


def test_who_has_a_row_in_the_step_being_planned_is_not_preempted() -> None:
    engine = Engine(num_blocks=8, num_host_blocks=4, **SWAP)
    engine.add(make_sequence(1, 20, 6))
    state, planner = engine.scheduler._state, engine.scheduler._planner
    row = planner.plan().rows[0]
    with pytest.raises(AssertionError, match="a row in the step that is being planned"):
        state.preempt(row)
