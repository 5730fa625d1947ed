"""Every refusal of a request by field, value and limit; what was refused leaves nothing behind."""

import pytest

from tests.core.builders import Engine, make_group, make_sequence
from worker.core.errors import InvalidSequenceError, QueueFullError
from worker.core.params import BeamParams
from worker.core.sequence import Sequence


def refusal_of(engine: Engine, *sequences: Sequence) -> InvalidSequenceError:
    with pytest.raises(InvalidSequenceError) as refusal:
        if len(sequences) == 1:
            engine.scheduler.add(sequences[0])
        else:
            engine.scheduler.add_group(list(sequences))
    engine.check()
    return refusal.value


@pytest.mark.parametrize(
    ("settings", "sequence", "field", "value", "limit", "words"),
    [
        ({}, {"prompt": []}, "token_ids", 0, 1, "the prompt is empty; at least 1 token is needed"),
        ({}, {"prompt": 5, "max_tokens": 0}, "max_tokens", 0, 1, "max_tokens must be at least 1"),
        ({}, {"prompt": 5, "max_tokens": -3}, "max_tokens", -3, 1, "max_tokens must be at least 1"),
        ({"max_model_len": 32}, {"prompt": 32}, "token_ids", 32, 31, "has 32 tokens; .* at most 31"),
        ({"max_model_len": 32}, {"prompt": 99}, "token_ids", 99, 31, "has 99 tokens; .* at most 31"),
        (
            {"max_num_batched_tokens": 8},
            {"prompt": 9},
            "token_ids",
            9,
            8,
            "a prompt of 9 tokens does not fit into one step of 8",
        ),
        ({"num_blocks": 2}, {"prompt": 40, "max_tokens": 1}, "max_tokens", 1, 0, "needs 3 .* there are 2"),
        ({"num_blocks": 2}, {"prompt": 10, "max_tokens": 24}, "max_tokens", 24, 23, "enough for 33 tokens"),
        ({"block_size": 1, "num_blocks": 8}, {"prompt": 6, "max_tokens": 4}, "max_tokens", 4, 3, "enough for 9"),
        ({}, {"prompt": 5, "beam": BeamParams(width=0)}, "beam.width", 0, 8, "beam width 0; 1 to 8"),
        ({}, {"prompt": 5, "beam": BeamParams(width=9)}, "beam.width", 9, 8, "beam width 9; 1 to 8"),
        ({}, {"prompt": 5, "output": [1], "beam": BeamParams(width=2)}, "token_ids", 6, 5, "from its prompt alone"),
    ],
)
def test_one_sequence(settings: dict, sequence: dict, field: str, value: int, limit: int, words: str) -> None:
    engine = Engine(**settings)
    refusal = refusal_of(engine, make_sequence(1, **sequence))
    assert (refusal.field, refusal.value, refusal.limit) == (field, value, limit)
    with pytest.raises(InvalidSequenceError, match=words):
        raise refusal
    assert not engine.scheduler.has_unfinished()


@pytest.mark.parametrize(
    ("settings", "sequence"),
    [
        ({"max_model_len": 32}, {"prompt": 31}),
        ({"max_num_batched_tokens": 8}, {"prompt": 8}),
        ({"num_blocks": 2}, {"prompt": 10, "max_tokens": 23}),
        ({"num_blocks": 2}, {"prompt": 32, "max_tokens": 1}),
        ({"block_size": 1, "num_blocks": 8}, {"prompt": 6, "max_tokens": 3}),
        ({"num_blocks": 2, "max_model_len": 33}, {"prompt": 10, "max_tokens": 1000}),
        ({}, {"prompt": 5, "beam": BeamParams(width=8)}),
    ],
)
def test_value_at_the_limit_runs(settings: dict, sequence: dict) -> None:
    engine = Engine(**settings)
    engine.add(make_sequence(1, **sequence))
    engine.run()
    assert engine.ended[1].finish_reason.name in ("LENGTH", "MODEL_LENGTH")


def test_resumed_sequence_that_outgrew_one_step_is_taken() -> None:
    """Its prompt fits; what it has generated since, elsewhere, is computed over several steps."""
    engine = Engine(max_num_batched_tokens=32)
    engine.add(whole := make_sequence(1, 30, 40))
    engine.run()
    engine.add(make_sequence(2, whole.token_ids[:30], 40, output=engine.tokens[1][:25]))
    engine.run()
    assert engine.tokens[2] == engine.tokens[1][25:]


def test_group_larger_than_the_batch() -> None:
    refusal = refusal_of(Engine(max_num_seqs=3), *make_group(1, 5, 4))
    assert (refusal.field, refusal.value, refusal.limit) == ("n", 4, 3)


def test_group_with_beams() -> None:
    parent = make_sequence(1, [1, 2], beam=BeamParams(width=2))
    assert refusal_of(Engine(), parent, make_sequence(2, [1, 2], parent_id=1, index=1)).field == "n"


def test_group_with_a_member_of_another_parent() -> None:
    refusal = refusal_of(Engine(), make_sequence(1, [1, 2]), make_sequence(2, [1, 2], parent_id=7, index=1))
    assert (refusal.field, refusal.value, refusal.limit) == ("parent_id", 2, 1)


def test_group_with_one_id_twice() -> None:
    refusal = refusal_of(Engine(), make_sequence(1, [1, 2]), make_sequence(1, [1, 2], parent_id=1, index=1))
    assert (refusal.field, refusal.value) == ("id", 1)


def test_group_with_an_id_in_use() -> None:
    engine = Engine()
    engine.add(make_sequence(2, 5))
    refusal = refusal_of(engine, *make_group(1, 5, 3))
    assert (refusal.field, refusal.value) == ("id", 2)
    assert engine.scheduler.load().num_waiting == 1


def test_id_may_be_used_again_after_the_end() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5, 1))
    engine.run()
    engine.ended.clear()
    engine.tokens.clear()
    engine.add(make_sequence(1, 5, 1))
    engine.run()
    assert engine.ended.keys() == {1}


def test_full_queue_names_both_numbers() -> None:
    engine = Engine(max_num_waiting=2)
    engine.add(make_sequence(1, 5), make_sequence(2, 5))
    with pytest.raises(QueueFullError) as refusal:
        engine.scheduler.add(make_sequence(3, 5))
    assert (refusal.value.num_waiting, refusal.value.limit) == (2, 2)


def test_group_that_would_overfill_the_queue_is_refused_whole() -> None:
    engine = Engine(max_num_waiting=3)
    engine.add(make_sequence(9, 5))
    with pytest.raises(QueueFullError):
        engine.scheduler.add_group(make_group(1, 5, 3))
    assert engine.scheduler.load().num_waiting == 1


def test_running_sequences_do_not_count_as_waiting() -> None:
    engine = Engine(max_num_waiting=1)
    engine.add(make_sequence(1, 5))
    engine.step()
    engine.add(make_sequence(2, 5))
    engine.run()
    assert engine.ended.keys() == {1, 2}


def test_preempted_sequence_returns_to_a_full_queue() -> None:
    engine = Engine(num_blocks=6, max_num_waiting=1, prefix="off")
    sequences = [make_sequence(1, 40, 20), make_sequence(2, 40, 20)]
    for seq in sequences:
        engine.add(seq)
        engine.step()
    engine.add(make_sequence(3, 40, 20))
    engine.run()
    assert sequences[1].num_preemptions == 1
    assert all(len(engine.tokens[id]) == 20 for id in (1, 2, 3))
