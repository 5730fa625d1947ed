"""State groups of models with recurrent state: one for each sequence that holds blocks, never shared."""

import random

import pytest

from tests.core.builders import Engine, expected_hypotheses, expected_output, make_group, make_sequence
from worker.core.cache.block_manager import BlockManager
from worker.core.config import CacheConfig
from worker.core.params import BeamParams
from worker.core.slices import exhaust


def make_engine(num_groups: int = 8, **settings: object) -> Engine:
    return Engine(num_groups=num_groups, max_num_seqs=num_groups, prefix="off", **settings)


def make_manager(num_groups: int) -> BlockManager:
    return BlockManager(CacheConfig(num_blocks=8, num_groups=num_groups, enable_prefix_caching=False))


def test_each_sequence_is_bound_with_a_group_of_its_own() -> None:
    engine = make_engine(4)
    engine.add(*(make_sequence(id, 5) for id in (1, 2, 3)))
    assert [new.group_id for new in engine.step().new_sequences] == [0, 1, 2]


def test_model_without_state_has_no_groups() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5))
    assert engine.step().new_sequences[0].group_id == -1


def test_group_of_a_finished_sequence_is_used_again() -> None:
    engine = make_engine(2)
    engine.add(make_sequence(1, 5, 1), make_sequence(2, 5, 9))
    engine.step()
    engine.add(make_sequence(3, 5, 1))
    assert engine.step().new_sequences[0].group_id == 0


def test_admission_needs_a_group_and_blocks() -> None:
    manager = make_manager(1)
    assert manager.can_allocate([], 2, 0)
    manager.allocate(make_sequence(1, 5), [], None, 1)
    assert not manager.can_allocate([], 2, 0)
    assert manager.pool.num_free == 7


def test_group_given_back_twice_raises() -> None:
    manager = make_manager(2)
    manager.allocate(seq := make_sequence(1, 5), [], None, 1)
    _, group_id = manager.unbind(seq)
    manager.give_back([], group_id)
    with pytest.raises(RuntimeError, match="group 0 is freed twice"):
        manager.give_back([], group_id)


def test_integrity_check_counts_groups() -> None:
    manager = make_manager(2)
    manager.allocate(make_sequence(1, 5), [], None, 1)
    exhaust(manager.integrity_slices({0: 1}, {}, 1))
    with pytest.raises(RuntimeError, match="0 groups held and 1 free of 2"):
        exhaust(manager.integrity_slices({0: 1}, {}, 0))


def test_group_is_not_handed_out_while_a_step_in_flight_uses_it() -> None:
    engine = make_engine(1, async_depth=1)
    engine.add(make_sequence(1, 5, 9))
    engine.submit()
    engine.scheduler.abort(1)
    engine.add(make_sequence(2, 5, 1))
    assert engine.submit() is None
    engine.retire()
    assert engine.submit().new_sequences[0].group_id == 0


def test_preempted_sequence_gives_its_group_up_and_comes_back_with_one() -> None:
    engine = make_engine(2, num_blocks=6)
    sequences = [make_sequence(1, 40, 20), make_sequence(2, 40, 20)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in sequences}
    engine.add(*sequences)
    while not sequences[1].num_preemptions:
        engine.step()
    assert (sequences[0].group_id, sequences[1].group_id) == (0, -1)
    engine.run()
    assert engine.tokens == wanted
    engine.assert_drained()


@pytest.mark.parametrize("depth", [0, 1])
def test_members_of_a_request_compute_the_prompt_each(depth: int) -> None:
    """State cannot be shared at the end of the prompt: it is not checkpointed there."""
    engine = make_engine(4, async_depth=depth)
    group = make_group(1, 20, 3, 4)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
    assert engine.runner.num_tokens == 3 * (20 + 3)
    assert sorted(new.group_id for batch in engine.batches for new in batch.new_sequences) == [0, 1, 2]
    engine.assert_drained()


@pytest.mark.parametrize("depth", [0, 1])
def test_beams_go_on_from_their_parents_states(depth: int) -> None:
    """In as many groups as there are beams; the fake runner compares each row's state with the tokens before it."""
    engine = make_engine(4, async_depth=depth)
    searches = [make_sequence(id, prompt, 24, beam=BeamParams(width=4)) for id, prompt in ((1, 20), (2, 21))]
    wanted = {seq.id: expected_hypotheses(seq, 256) for seq in searches}
    engine.add(*searches)
    engine.run()
    assert {id: ended.hypotheses for id, ended in engine.ended.items()} == wanted
    assert engine.runner.num_tokens == 20 + 21 + 2 * 4 * 23
    engine.assert_drained()


def test_equal_prompts_are_never_shared() -> None:
    engine = make_engine(4)
    for id in (1, 2):
        engine.add(make_sequence(id, list(range(40)), 1))
        engine.run()
    assert (engine.runner.num_tokens, engine.ended[2].num_cached_tokens) == (80, 0)


@pytest.mark.parametrize("seed", range(8))
def test_streams_and_groups_survive_random_traffic(seed: int) -> None:
    rnd = random.Random(seed)
    engine = make_engine(
        5,
        num_blocks=rnd.randrange(6, 12),
        async_depth=seed % 2,
        scheduling_policy=rnd.choice(["prefill_first", "chunked"]),
        max_num_batched_tokens=64,
    )
    wanted = {}
    ids = iter(range(1, 1000, 10))
    for _ in range(60):
        if rnd.random() < 0.4:
            group = make_group(next(ids), rnd.randrange(1, 40), rnd.choice([1, 1, 3]), rnd.randrange(1, 40))
            wanted |= {seq.id: expected_output(seq, 256)[0] for seq in group}
            engine.scheduler.add_group(group)
        if wanted and rnd.random() < 0.2:
            engine.scheduler.abort(rnd.choice(list(wanted)))
        engine.step()
    engine.run()
    assert engine.ended.keys() == wanted.keys()
    for id, ended in engine.ended.items():
        tokens = wanted[id] if ended.finish_reason.name == "LENGTH" else wanted[id][: len(engine.tokens[id])]
        assert engine.tokens[id] == tokens
    engine.assert_drained()
    assert len(engine.scheduler._blocks.groups._free) == 5
