"""An abort takes effect in every state, once."""

import pytest

from tests.core.builders import Engine, make_sequence
from worker.core.stopping import FinishReason


def test_unknown_and_finished_ids_are_ignored() -> None:
    engine = Engine()
    assert not engine.scheduler.abort(7)
    engine.add(make_sequence(1, 3, 1))
    engine.run()
    assert not engine.scheduler.abort(1)
    assert engine.scheduler.take_outputs() == []


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_while_waiting_in_a_chunk_and_running(num_steps: int) -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=16)
    engine.add(make_sequence(1, 40, 50))
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort(1, detail="client went away")
    assert not engine.scheduler.abort(1)
    engine.check()
    ended = engine.ended[1]
    assert (ended.finish_reason, ended.detail) == (FinishReason.ABORTED, "client went away")
    assert len(engine.tokens[1]) == max(num_steps - 2, 0)
    engine.assert_drained()


def test_abort_of_a_waiting_sequence_lets_those_behind_it_move_up() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(*(make_sequence(id, 3, 2) for id in (1, 2, 3)))
    engine.step()
    engine.scheduler.abort(2)
    engine.run()
    assert list(engine.ended) == [2, 1, 3]


def test_row_that_could_not_be_sampled_ends_that_sequence_only() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 32, 5), make_sequence(2, 32, 5))
    engine.runner.failing_slots = {0}
    engine.step()
    engine.runner.failing_slots = set()
    engine.run()
    assert (engine.ended[1].finish_reason, engine.ended[1].detail) == (FinishReason.ERROR, "output is not finite")
    assert engine.tokens[1] == []
    assert engine.ended[2].finish_reason is FinishReason.LENGTH


def test_blocks_of_a_failed_row_are_not_published() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 40, 5))
    engine.runner.failing_slots = {0}
    engine.step()
    assert engine.scheduler.load().num_cached_blocks == 0
    engine.runner.failing_slots = set()
    engine.add(again := make_sequence(2, [1000 + at for at in range(40)], 5))
    engine.run()
    assert again.num_cached_tokens == 0


def test_resumed_sequence_continues_where_the_other_worker_stopped() -> None:
    engine = Engine()
    whole = make_sequence(1, 10, 8)
    engine.add(whole)
    engine.run()
    engine.add(make_sequence(2, [1000 + at for at in range(10)], 8, output=engine.tokens[1][:3]))
    engine.run()
    assert engine.tokens[2] == engine.tokens[1][3:]
    assert engine.offsets == {1: 0, 2: 3}


def test_resumed_sequence_that_was_complete_ends_at_once() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 10, 2, output=[5, 6]), make_sequence(2, 10, 9, output=[5, 0], eos=(0,)))
    engine.check()
    assert {id: ended.finish_reason for id, ended in engine.ended.items()} == {
        1: FinishReason.LENGTH,
        2: FinishReason.EOS,
    }
    assert engine.scheduler.schedule() is None
