"""n > 1: one prompt, computed once; members that end, fail and are aborted on their own."""

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from worker.core.errors import InvalidSequenceError
from worker.core.stopping import FinishReason

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@BOTH_DEPTHS
@pytest.mark.parametrize("prefix", ["off", "hash", "radix"])
@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 40])
def test_prompt_is_computed_once_and_members_differ(depth: int, prefix: str, prompt: int) -> None:
    engine = Engine(async_depth=depth, prefix=prefix)
    group = make_group(1, prompt, 4, 6)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
    assert [engine.ended[id].index for id in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert engine.runner.num_tokens == prompt + 3 + 4 * 5
    engine.assert_drained()


def test_members_share_full_blocks_and_copy_the_one_they_write() -> None:
    engine = Engine()
    engine.scheduler.add_group(make_group(1, 20, 3, 4))
    engine.step()
    batch = engine.step()
    assert [new.block_ids for new in batch.new_sequences] == [(0, 2), (0, 3)]
    assert batch.blocks_to_copy == [(1, 2), (1, 3)]
    assert (batch.num_computed_tokens, batch.num_scheduled_tokens) == ([19, 19], [1, 1])
    assert engine.scheduler.load().num_used_blocks == 4


def test_members_wait_for_the_prompt_without_blocking_others() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=16)
    engine.scheduler.add_group(make_group(1, 40, 2, 2))
    engine.add(make_sequence(9, 4, 1))
    for _ in range(3):
        engine.step()
    assert engine.batches[2].num_scheduled_tokens == [8, 4]


@BOTH_DEPTHS
@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("prefix", ["off", "hash"])
def test_abort_of_the_first_member_leaves_the_others_alone(depth: int, num_steps: int, prefix: str) -> None:
    """It hit a stop string, which the router alone knows; the others go on, wherever the prompt had got to."""
    engine = Engine(async_depth=depth, prefix=prefix, scheduling_policy="chunked", max_num_batched_tokens=16)
    group = make_group(1, 40, 4, 30)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort(1)
    engine.run()
    assert engine.ended[1].finish_reason is FinishReason.ABORTED
    assert {id: engine.tokens[id] for id in (2, 3, 4)} == {id: wanted[id] for id in (2, 3, 4)}
    engine.assert_drained()


@BOTH_DEPTHS
@pytest.mark.parametrize("prefix", ["off", "hash", "radix"])
@pytest.mark.parametrize("resumed", [[2, 2, 2], [0, 5, 1], [5, 0, 0], [1, 19, 0]])
def test_members_resume_with_different_tokens_so_far(depth: int, prefix: str, resumed: list[int]) -> None:
    """Their worker was lost: what is left of a group comes again, each member with what it had (E6)."""
    engine = Engine(async_depth=depth, prefix=prefix)
    wanted = {}
    group = []
    for seq, num in zip(make_group(1, 37, 3, 20), resumed, strict=True):
        tokens, _ = expected_output(seq, 256)
        wanted[seq.id] = tokens[num:]
        prompt = seq.token_ids
        more = {"seed": seq.sampling.seed, "parent_id": seq.parent_id, "index": seq.index}
        group.append(make_sequence(seq.id, prompt, 20, output=tokens[:num], **more))
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted
    assert engine.offsets == {1 + at: num for at, num in enumerate(resumed)}
    engine.assert_drained()


def test_members_run_on_their_own_when_the_first_fails() -> None:
    engine = Engine(prefix="off")
    group = make_group(1, 20, 3, 4)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    engine.runner.failing_slots = {0}
    engine.step()
    engine.runner.failing_slots = set()
    engine.run()
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    assert (engine.tokens[2], engine.tokens[3]) == (wanted[2], wanted[3])


@BOTH_DEPTHS
def test_id_of_a_parent_is_taken_as_long_as_a_child_lives(depth: int) -> None:
    engine = Engine(async_depth=depth, max_num_seqs=2)
    parent, child = make_group(1, 20, 2, 8)
    engine.scheduler.add_group([parent, child])
    engine.scheduler.abort(1)
    wanted = expected_output(child, 256)[0]
    for again in ([make_sequence(1, 30)], make_group(1, 30, 2)):
        with pytest.raises(InvalidSequenceError) as refusal:
            engine.scheduler.add_group(again) if len(again) > 1 else engine.scheduler.add(*again)
        assert (refusal.value.field, refusal.value.value) == ("id", 1)
    engine.run()
    assert engine.tokens[2] == wanted
    engine.scheduler.add(make_sequence(1, 30))


def test_a_member_comes_with_its_group_only() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 20))
    with pytest.raises(InvalidSequenceError) as refusal:
        engine.scheduler.add(make_sequence(2, 20, parent_id=1, index=1))
    assert refusal.value.field == "parent_id"
