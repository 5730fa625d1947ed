"""n > 1 under pressure of every kind: who ends when, who is aborted in which order, what is admitted at all."""

import itertools

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from worker.core.errors import InvalidSequenceError, QueueFullError
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def ragged_group(prompt: int, lengths: list[int]) -> list[Sequence]:
    """Ids from 1 on, one prompt; each member ends after its own number of tokens."""
    parent = make_sequence(1, prompt, lengths[0])
    return [parent] + [
        make_sequence(1 + at, parent.token_ids, length, seed=at, parent_id=1, index=at)
        for at, length in enumerate(lengths[1:], start=1)
    ]


def assert_forgotten(engine: Engine) -> None:
    engine.assert_drained()
    state = engine.scheduler._state
    assert not (state.sequences or state.groups.num_parked)
    assert sorted(state.holdings.free_slots) == list(range(engine.config.max_num_seqs))


@BOTH_DEPTHS
@pytest.mark.parametrize("lengths", [[1, 5, 3, 9], [9, 1, 1, 1], [3, 3, 3, 3], [20, 1, 40, 2]])
def test_members_end_at_different_times(depth: int, lengths: list[int]) -> None:
    engine = Engine(async_depth=depth)
    group = ragged_group(20, lengths)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
    assert [len(engine.tokens[1 + at]) for at in range(4)] == lengths
    assert_forgotten(engine)


@BOTH_DEPTHS
@pytest.mark.parametrize("order", list(itertools.permutations([2, 3, 4])))
def test_members_are_aborted_in_any_order(depth: int, order: tuple[int, ...]) -> None:
    engine = Engine(async_depth=depth)
    engine.scheduler.add_group(make_group(1, 20, 4, 8))
    for _ in range(3):
        engine.step()
    for id in order:
        assert engine.scheduler.abort(id)
        engine.step()
    engine.run()
    assert list(engine.ended) == [*order, 1]
    assert engine.ended[1].finish_reason is FinishReason.LENGTH
    assert_forgotten(engine)


@BOTH_DEPTHS
@pytest.mark.parametrize("num_steps", range(5))
def test_abort_of_one_member_leaves_the_others_alone(depth: int, num_steps: int) -> None:
    engine = Engine(async_depth=depth)
    group = make_group(1, 20, 3, 6)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort(2)
    engine.run()
    assert (engine.tokens[1], engine.tokens[3]) == (wanted[1], wanted[3])
    assert engine.tokens[2] == wanted[2][: len(engine.tokens[2])]
    assert_forgotten(engine)


def test_member_stops_early_and_the_others_are_aborted_at_the_third_step() -> None:
    engine = Engine()
    engine.scheduler.add_group(ragged_group(20, [30, 1, 30, 30]))
    for _ in range(3):
        engine.step()
    assert list(engine.ended) == [2]
    assert all(engine.scheduler.abort(id) for id in (1, 3, 4))
    assert not any(engine.scheduler.abort(id) for id in (1, 2, 3, 4))
    engine.check()
    assert {id: ended.finish_reason.name for id, ended in engine.ended.items()} == {
        2: "LENGTH",
        1: "ABORTED",
        3: "ABORTED",
        4: "ABORTED",
    }
    assert_forgotten(engine)


def test_group_larger_than_the_batch_is_refused_whole() -> None:
    engine = Engine(max_num_seqs=3)
    with pytest.raises(InvalidSequenceError):
        engine.scheduler.add_group(make_group(1, 5, 4))
    assert_forgotten(engine)


def test_group_larger_than_the_queue_is_refused_whole() -> None:
    engine = Engine(max_num_waiting=3)
    with pytest.raises(QueueFullError):
        engine.scheduler.add_group(make_group(1, 5, 4))
    assert_forgotten(engine)


def test_group_with_one_member_that_cannot_run_is_refused_whole() -> None:
    engine = Engine(num_blocks=4)
    with pytest.raises(InvalidSequenceError):
        engine.scheduler.add_group(ragged_group(20, [5, 5, 500]))
    assert_forgotten(engine)


def test_no_member_starts_where_not_all_can_follow() -> None:
    engine = Engine(max_num_seqs=4)
    engine.add(make_sequence(9, 5, 3))
    engine.step()
    engine.scheduler.add_group(make_group(1, 20, 4, 2))
    batch = engine.step()
    assert (batch.num_scheduled_tokens, engine.scheduler.load().num_waiting) == ([1], 4)
    engine.run()
    assert engine.ended.keys() == {1, 2, 3, 4, 9}


def test_group_waits_for_blocks_that_its_copies_will_need() -> None:
    engine = Engine(num_blocks=6)
    engine.add(make_sequence(9, 40, 3))
    engine.step()
    engine.scheduler.add_group(make_group(1, 20, 3, 2))
    assert engine.step().num_scheduled_tokens == [1], "2 blocks and 2 copies do not fit into 3"
    engine.run()
    assert engine.scheduler.load().num_preemptions == 0


@pytest.mark.parametrize(
    ("prompt", "tables", "copies"),
    [
        (15, [(1,), (2,)], [(0, 1), (0, 2)]),
        (16, [(1,), (2,)], [(0, 1), (0, 2)]),
        (17, [(0, 2), (0, 3)], [(1, 2), (1, 3)]),
        (33, [(0, 1, 3), (0, 1, 4)], [(2, 3), (2, 4)]),
    ],
)
def test_block_of_the_last_prompt_token_is_copied(prompt: int, tables: list, copies: list) -> None:
    engine = Engine()
    engine.scheduler.add_group(make_group(1, prompt, 3, 4))
    engine.step()
    batch = engine.step()
    assert ([new.block_ids for new in batch.new_sequences], batch.blocks_to_copy) == (tables, copies)


@pytest.mark.parametrize("num", [2, 8])
def test_prompt_is_held_once(num: int) -> None:
    engine = Engine(max_num_seqs=8)
    engine.scheduler.add_group(make_group(1, 160, num, 4))
    for _ in range(2):
        engine.step()
    assert engine.scheduler.load().num_used_blocks == 10 + (num - 1)


def test_member_takes_the_first_token_with_its_own_seed() -> None:
    engine = Engine()
    group = make_group(1, 20, 8, 1)
    wanted = [expected_output(seq, 256)[0] for seq in group]
    engine.scheduler.add_group(group)
    engine.run()
    assert [engine.tokens[id] for id in range(1, 9)] == wanted
    assert len({tokens[0] for tokens in wanted}) > 1


def test_cached_tokens_of_a_member_are_the_prompt_but_for_what_it_ran() -> None:
    engine = Engine()
    engine.scheduler.add_group(make_group(1, 20, 2, 2))
    engine.run()
    assert [engine.ended[id].num_cached_tokens for id in (1, 2)] == [0, 19]


def test_members_stand_in_the_queue_where_their_parent_stood() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=16, max_num_seqs=4)
    engine.scheduler.add_group(make_group(1, 16, 2, 20))
    engine.add(make_sequence(9, 16, 20))
    engine.step()
    batch = engine.step()
    assert batch.num_scheduled_tokens == [1, 1, 14], "the parent, its member, then who came later"


@BOTH_DEPTHS
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_groups_in_a_pool_for_one_both_finish(depth: int, mode: str) -> None:
    engine = Engine(num_blocks=8, num_host_blocks=4, preemption_mode=mode, async_depth=depth)
    groups = [make_group(1, 20, 4, 20), make_group(11, 20, 4, 20)]
    wanted = {seq.id: expected_output(seq, 256)[0] for group in groups for seq in group}
    for group in groups:
        engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
    assert_forgotten(engine)
