"""Requests and configurations that cannot work are refused at once, with the number that would."""

import pytest

from tests.core.builders import Engine, make_group, make_sequence
from worker.core.config import CacheConfig, SchedulerConfig, check_together
from worker.core.errors import ConfigError, InvalidSequenceError, QueueFullError
from worker.core.params import BeamParams
from worker.core.sequence import Sequence, SequenceStatus
from worker.core.stopping import FinishReason


def refuse(engine: Engine, sequence: Sequence) -> InvalidSequenceError:
    """The refusal; and a small request behind it completes."""
    with pytest.raises(InvalidSequenceError) as refusal:
        engine.scheduler.add(sequence)
    assert not engine.scheduler.has_unfinished()
    engine.add(make_sequence(999, 2, 1))
    engine.run()
    assert len(engine.tokens[999]) == 1
    engine.assert_drained()
    return refusal.value


def test_prompt_larger_than_the_pool() -> None:
    error = refuse(Engine(num_blocks=2), make_sequence(1, 40, 1))
    assert (error.field, error.value, error.limit) == ("max_tokens", 1, 0)
    assert "needs 3 cache blocks of 16 tokens; there are 2, enough for 33 tokens" in error.message


def test_prompt_and_max_tokens_larger_than_the_pool() -> None:
    error = refuse(Engine(num_blocks=2), make_sequence(1, 10, 30))
    assert (error.field, error.value, error.limit) == ("max_tokens", 30, 23)


def test_request_that_just_fits_the_pool_runs() -> None:
    engine = Engine(num_blocks=2)
    engine.add(make_sequence(1, 10, 23))
    engine.run()
    assert len(engine.tokens[1]) == 23


def test_prompt_larger_than_the_budget_without_chunks() -> None:
    error = refuse(Engine(max_num_batched_tokens=8), make_sequence(1, 9))
    assert (error.field, error.value, error.limit) == ("token_ids", 9, 8)


def test_prompt_larger_than_the_budget_with_chunks() -> None:
    engine = Engine(max_num_batched_tokens=8, scheduling_policy="chunked")
    engine.add(make_sequence(1, 9, 1))
    engine.run()
    assert [batch.num_scheduled_tokens for batch in engine.batches] == [[8], [1]]


@pytest.mark.parametrize("length", [32, 33])
def test_prompt_as_long_as_the_model(length: int) -> None:
    error = refuse(Engine(max_model_len=32), make_sequence(1, length))
    assert (error.field, error.value, error.limit) == ("token_ids", length, 31)


def test_prompt_one_shorter_than_the_model_gives_one_token() -> None:
    engine = Engine(max_model_len=32)
    engine.add(make_sequence(1, 31, 10))
    engine.run()
    assert (len(engine.tokens[1]), engine.ended[1].finish_reason) == (1, FinishReason.MODEL_LENGTH)


def test_empty_prompt() -> None:
    assert refuse(Engine(), make_sequence(1, [])).field == "token_ids"


def test_max_tokens_zero() -> None:
    error = refuse(Engine(), make_sequence(1, 5, 0))
    assert (error.field, error.value, error.limit) == ("max_tokens", 0, 1)


def test_max_tokens_one_schedules_exactly_the_prompt() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5, 1))
    engine.run()
    assert engine.runner.num_tokens == 5
    assert (len(engine.tokens[1]), engine.ended[1].finish_reason) == (1, FinishReason.LENGTH)


def test_id_in_use() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5))
    with pytest.raises(InvalidSequenceError, match="id 1 is unfinished"):
        engine.scheduler.add(make_sequence(1, 5))


def test_full_queue_takes_nothing() -> None:
    engine = Engine(max_num_waiting=2)
    engine.add(make_sequence(1, 5), make_sequence(2, 5))
    with pytest.raises(QueueFullError, match="2 sequences are waiting, the limit is 2"):
        engine.scheduler.add(make_sequence(3, 5))
    engine.run()
    assert engine.ended.keys() == {1, 2}


def test_group_is_admitted_as_a_whole_or_not_at_all() -> None:
    engine = Engine(max_num_waiting=3)
    with pytest.raises(QueueFullError):
        engine.scheduler.add_group(make_group(1, 5, 4))
    engine = Engine(max_num_seqs=3)
    with pytest.raises(InvalidSequenceError) as refusal:
        engine.scheduler.add_group(make_group(1, 5, 4))
    assert (refusal.value.field, refusal.value.value, refusal.value.limit) == ("n", 4, 3)
    assert not engine.scheduler.has_unfinished()


@pytest.mark.parametrize("width", [0, 9])
def test_beam_width(width: int) -> None:
    error = refuse(Engine(), make_sequence(1, 5, beam=BeamParams(width=width)))
    assert (error.field, error.value, error.limit) == ("beam.width", width, 8)


def test_all_beams_must_fit_the_pool() -> None:
    error = refuse(Engine(num_blocks=5), make_sequence(1, 20, 10, beam=BeamParams(width=3)))
    assert "needs 6 cache blocks" in error.message


@pytest.mark.parametrize(
    ("settings", "field", "number"),
    [
        ({"max_model_len": 1}, "max_model_len", "2"),
        ({"max_num_seqs": 0}, "max_num_seqs", "1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens", "64"),
        ({"max_prefill_chunk": 999, "max_num_batched_tokens": 512}, "max_prefill_chunk", "512"),
        ({"scheduling_policy": "fifo"}, "scheduling_policy", "chunked"),
        ({"preemption_policy": "random"}, "preemption_policy", "fcfs"),
        ({"preemption_mode": "drop"}, "preemption_mode", "swap"),
        ({"scheduler_delay_factor": -1.0}, "scheduler_delay_factor", "0"),
        ({"decode_quota": 0}, "decode_quota", "1"),
        ({"watermark": 1.0}, "watermark", "1"),
        ({"max_num_waiting": -1}, "max_num_waiting", "0"),
        ({"async_depth": 2}, "async_depth", "0 or 1"),
    ],
)
def test_scheduler_config(settings: dict, field: str, number: str) -> None:
    with pytest.raises(ConfigError, match=number) as error:
        SchedulerConfig(**({"max_model_len": 128} | settings))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("settings", "field", "number"),
    [
        ({"block_size": 24}, "block_size", "16 or 32"),
        ({"block_size": 0}, "block_size", "1 or 16"),
        ({"num_blocks": 0}, "num_blocks", "1"),
        ({"num_host_blocks": -1}, "num_host_blocks", "0"),
        ({"num_groups": -1}, "num_groups", "0"),
        ({"prefix_index": "tree"}, "prefix_index", "radix"),
        ({"secure": True, "num_host_blocks": 4}, "secure", "0"),
        ({"num_groups": 4}, "enable_prefix_caching", "False"),
        ({"num_groups": 4, "enable_prefix_caching": False, "num_host_blocks": 2}, "num_host_blocks", "0"),
    ],
)
def test_cache_config(settings: dict, field: str, number: str) -> None:
    with pytest.raises(ConfigError, match=number) as error:
        CacheConfig(**({"num_blocks": 8} | settings))
    assert error.value.field == field


def test_configs_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="num_host_blocks: is 0"):
        check_together(SchedulerConfig(max_model_len=64, preemption_mode="swap"), CacheConfig(num_blocks=8))
    with pytest.raises(ConfigError, match="num_groups: is 4; at least max_num_seqs \\(512\\)"):
        groups = CacheConfig(num_blocks=8, num_groups=4, enable_prefix_caching=False)
        check_together(SchedulerConfig(max_model_len=64), groups)


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ([SequenceStatus.RUNNING, SequenceStatus.SWAPPED, SequenceStatus.RUNNING, SequenceStatus.FINISHED], True),
        ([SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.ABORTED], True),
        ([SequenceStatus.SWAPPED], False),
        ([SequenceStatus.ABORTED, SequenceStatus.WAITING], False),
        ([SequenceStatus.RUNNING, SequenceStatus.FINISHED, SequenceStatus.ABORTED], False),
        ([SequenceStatus.RUNNING, SequenceStatus.SWAPPED, SequenceStatus.WAITING], False),
    ],
)
def test_state_machine(path: list[SequenceStatus], is_allowed: bool) -> None:
    sequence = make_sequence(1, 5)
    for status in path[:-1]:
        sequence.move_to(status)
    if is_allowed:
        sequence.move_to(path[-1])
        assert sequence.status is path[-1]
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {sequence.status.name} to {path[-1].name}"):
            sequence.move_to(path[-1])
