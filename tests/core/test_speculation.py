"""Rows with drafts: what they get, what they may take, and what is left behind by those that were wrong."""

from collections.abc import Callable

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from tests.core.drafters import RandomDrafter, ScriptedDrafter
from tests.core.helpers import answer, scheduled
from worker.core.batch import BatchOutput
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.errors import ConfigError
from worker.core.params import BeamParams
from worker.core.scheduler import Scheduler
from worker.core.stopping import FinishReason


def drafting(num_right: int | Callable[[int], int], num_wrong: int = 0, k: int = 4, **engine) -> Engine:
    right = num_right if callable(num_right) else lambda step: num_right
    return Engine(drafter=ScriptedDrafter(right, num_wrong), num_speculative_tokens=k, **engine)


@pytest.mark.parametrize(
    ("num_right", "num_wrong", "steps"),
    [
        (4, 0, [[6], [5], [5], [1]]),  # 1 + 5 + 5 + 1 tokens
        (2, 2, [[6], [5], [5], [5], [2]]),  # 1 + 3 + 3 + 3 + 2: where two are left, one of them is drafted
        (0, 4, [[6], [5], *[[2]] * 9, [1]]),  # where all were wrong, one is tried
        (0, 0, [[6], *[[1]] * 11]),
    ],
)
def test_tokens_are_those_of_a_run_without(num_right, num_wrong, steps):
    engine = drafting(num_right, num_wrong)
    sequence = make_sequence(1, 6, 12)
    wanted = expected_output(sequence, 256)
    engine.add(sequence)
    engine.run()
    assert (engine.tokens[1], engine.ended[1].finish_reason) == wanted
    assert scheduled(engine) == steps
    engine.assert_drained()


def test_counts_are_a_sequences_and_the_schedulers():
    engine = drafting(lambda step: step % 3, num_wrong=1)
    engine.add(make_sequence(1, 6, 20), make_sequence(2, 6, 20))
    engine.run()
    load = engine.scheduler.load()
    ends = engine.ended.values()
    # Of 19 tokens after the first, in steps of 1, 2, 3, 1, 2, 3, … the last of one token that has no room for a draft.
    # One draft is tried after none was right, and two, all of them right, after one was.
    counts = [(end.timings.num_draft_tokens, end.timings.num_accepted_tokens) for end in ends]
    assert counts == [(12, 9)] * 2
    assert (load.num_draft_tokens, load.num_accepted_tokens, load.accepted_counts) == (24, 18, (6, 6, 6, 0, 0))
    assert load.num_generated_tokens == 40


def test_a_row_tries_twice_as_many_as_were_right_in_the_last():
    num_right = [8, 0, 0, 1, 2, 4, 8]
    engine = drafting(lambda step: num_right[step], num_wrong=8, k=8)
    engine.add(make_sequence(1, 6, 40))
    for _ in range(1 + len(num_right)):
        engine.step()
    drafter = engine.scheduler._planner._drafted._drafter
    assert [most for _, most in drafter.asked] == [8, 8, 1, 1, 2, 4, 8]


def test_without_drafts_nothing_is_counted():
    engine = Engine()
    engine.add(make_sequence(1, 6, 4))
    engine.run()
    load = engine.scheduler.load()
    assert (load.num_draft_tokens, load.num_accepted_tokens, load.accepted_counts) == (0, 0, ())
    assert all(not batch.num_draft_tokens for batch in engine.batches)


@pytest.mark.parametrize(
    ("stop", "rows", "kept", "reason"),
    [
        ({"eos": (42,)}, [10, 42, 12], [10, 42], FinishReason.EOS),
        ({"stop_ids": (42,)}, [10, 42, 12], [10, 42], FinishReason.STOP_TOKEN),
        ({"stop_sequences": ((9, 10),)}, [10, 42, 12], [10], FinishReason.STOP_SEQUENCE),
        ({"stop_sequences": ((10, 42),)}, [10, 42, 12], [10, 42], FinishReason.STOP_SEQUENCE),
        ({"eos": (42,), "min_tokens": 4}, [10, 42, 42], [10, 42, 42], FinishReason.EOS),
        ({"max_tokens": 4}, [10, 11, 12], [10, 11, 12], FinishReason.LENGTH),
    ],
)
def test_the_first_stop_of_the_accepted_tokens_ends_it(stop, rows, kept, reason):
    engine = drafting(lambda step: 2)
    engine.scheduler.add(make_sequence(1, [1, 2, 3], **({"max_tokens": 9} | stop)))
    answer(engine, [[9]])
    (end,) = answer(engine, [rows])
    assert (end.token_ids, end.finish_reason) == (kept, reason)
    assert engine.scheduler.load().num_generated_tokens == 1 + len(kept)
    engine.assert_drained()


def test_no_drafts_past_the_limit():
    """Each could be kept with the token after it; total computed tokens are then prompt + max_tokens − 1."""
    engine = drafting(9, k=9, max_model_len=20)
    engine.add(make_sequence(1, 6, 8), make_sequence(2, 10, None))
    engine.run()
    assert engine.scheduler._planner._drafted._drafter.asked == [(1, 6), (2, 8)]
    assert [engine.ended[id].finish_reason for id in (1, 2)] == [FinishReason.LENGTH, FinishReason.MODEL_LENGTH]
    assert engine.scheduler.load().num_scheduled_tokens == 6 + 8 - 1 + 10 + 10 - 1


def test_blocks_are_published_when_their_tokens_are_verified():
    """14 prompt tokens and one: two right drafts fill the first block, two wrong ones reach into the second."""
    engine = drafting(lambda step: 2, num_wrong=2)
    engine.add(make_sequence(1, 14, 9))
    engine.step()
    assert not list(engine.scheduler._blocks.index.published())
    engine.step()
    assert len(list(engine.scheduler._blocks.index.published())) == 1
    engine.run()
    engine.add(make_sequence(2, [1000 + at for at in range(14)] + engine.tokens[1], 1))
    engine.run()
    assert engine.ended[2].num_cached_tokens == 16


def test_a_row_gets_blocks_for_its_drafts_and_keeps_them():
    """Needed − held: 15 tokens and four drafts take a second block, which is there when they were wrong."""
    engine = drafting(0, num_wrong=4, prefix="off")
    engine.add(make_sequence(1, 14, 9))
    engine.step()
    (seq,) = engine.scheduler._state.decoding.values()
    assert len(seq.block_table) == 1
    engine.step()
    assert (len(seq.block_table), seq.num_computed_tokens, seq.num_in_flight_tokens) == (2, 15, 0)
    engine.step()
    assert len(seq.block_table) == 2


def test_drafts_take_no_block_that_a_running_sequence_may_need():
    """Two sequences fill a block each; of the two that are left, each will need one."""
    engine = drafting(0, num_wrong=4, num_blocks=4, prefix="off")
    engine.add(make_sequence(1, 14, 8), make_sequence(2, 14, 8))
    engine.step()
    batch = engine.step()
    assert batch.num_scheduled_tokens == [2, 2]  # what their blocks hold
    engine.run()
    assert engine.scheduler.load().num_preemptions == 0


def test_drafts_leave_a_token_for_every_slot():
    engine = drafting(4, max_num_seqs=4, max_num_batched_tokens=10, scheduling_policy="chunked", k=4)
    engine.add(make_sequence(1, 3, 30), make_sequence(2, 3, 30), make_sequence(3, 3, 30))
    engine.step()
    engine.add(make_sequence(4, 30, 2))
    batch = engine.step()
    assert batch.num_scheduled_tokens == [5, 3, 1, 1]
    assert batch.num_draft_tokens == {0: 4, 1: 2}
    engine.run()


def test_beams_get_none_beside_rows_that_do():
    engine = drafting(3)
    engine.add(make_sequence(1, 6, 6, beam=BeamParams(width=2)), make_sequence(2, 6, 6))
    engine.run()
    assert {seq for seq, _ in engine.scheduler._planner._drafted._drafter.asked} == {2}
    assert engine.batches[1].num_draft_tokens == {0: 3}


def test_members_of_a_group_draft_each_for_itself():
    engine = drafting(lambda step: step % 4, num_wrong=1)
    group = make_group(1, 20, 3, 12)
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in group}
    engine.scheduler.add_group(group)
    engine.run()
    assert engine.tokens == wanted


def test_what_is_not_finite_ends_where_it_would_have_without_drafts():
    """The second draft is right and its position cannot be sampled: the tokens up to it come first, then the error."""
    engine = drafting(4)
    sequence = make_sequence(1, 6, 12)
    tokens, _ = expected_output(sequence, 256)
    engine.runner.broken_tokens = {tokens[2]}
    first = tokens.index(tokens[2])
    engine.add(sequence)
    engine.run()
    assert engine.ended[1].finish_reason is FinishReason.ERROR
    assert engine.tokens[1] == tokens[: first + 1]


def test_preemption_between_two_steps_with_drafts():
    engine = Engine(drafter=RandomDrafter(1), num_speculative_tokens=5, num_blocks=6, watermark=0.0)
    sequences = [make_sequence(id, 20, 24) for id in range(1, 4)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in sequences}
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
    assert engine.scheduler.load().num_preemptions > 0


def test_abort_while_its_drafts_are_in_flight():
    engine = drafting(4)
    engine.add(make_sequence(1, 14, 12))
    engine.step()
    batch = engine.submit()
    assert batch.num_draft_tokens == {0: 4}
    engine.scheduler.abort(1)
    engine.retire()
    assert engine.ended[1].finish_reason is FinishReason.ABORTED
    assert len(engine.tokens[1]) == 1
    engine.assert_drained()


def config(**more: int) -> SchedulerConfig:
    return SchedulerConfig(**({"max_model_len": 64, "async_depth": 0, "num_speculative_tokens": 4} | more))


@pytest.mark.parametrize(
    ("more", "field", "number"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", "0"),
        ({"async_depth": 1}, "async_depth", "0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 11}, "max_num_batched_tokens", "12"),
    ],
)
def test_what_cannot_work_is_refused(more, field, number):
    with pytest.raises(ConfigError, match=f"{number}.* is needed") as error:
        config(**more)
    assert error.value.field == field


def test_a_drafter_and_its_number_come_together():
    with pytest.raises(ValueError, match="drafter"):
        Scheduler(config(), CacheConfig(num_blocks=8))
    with pytest.raises(ValueError, match="drafter"):
        Scheduler(config(num_speculative_tokens=0), CacheConfig(num_blocks=8), drafter=RandomDrafter(0))


def test_a_failed_row_has_no_drafts_in_flight():
    engine = drafting(4, k=4)
    engine.scheduler.add(make_sequence(1, 16, 12))
    answer(engine, [[9]])
    batch = engine.scheduler.schedule()
    assert batch is not None and batch.num_draft_tokens == {0: 4}
    engine.scheduler.postprocess(batch, BatchOutput(step=batch.step, token_ids=[[]], errors={0: "not finite"}))
    (end,) = engine.scheduler.take_outputs()
    assert end.finish_reason is FinishReason.ERROR
    engine.assert_drained()
