"""Limits of every setting: the last value that works, the first that does not, and a refusal that names both."""

import pytest

from tests.core.builders import Engine
from worker.core.config import CacheConfig, SchedulerConfig, check_together
from worker.core.errors import ConfigError

BASE = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
CACHE = {"num_blocks": 8}


def scheduler_config(**settings: object) -> SchedulerConfig:
    return SchedulerConfig(**(BASE | settings))


def cache_config(**settings: object) -> CacheConfig:
    return CacheConfig(**(CACHE | settings))


@pytest.mark.parametrize(
    ("field", "works", "refused", "named"),
    [
        ("max_model_len", 2, 1, "2"),
        ("max_num_seqs", 1, 0, "1"),
        ("max_num_batched_tokens", 8, 7, "8"),
        ("max_prefill_chunk", 64, 65, "64"),
        ("max_prefill_chunk", 0, -1, "0"),
        ("scheduler_delay_factor", 0.0, -0.5, "0"),
        ("decode_quota", 1, 0, "1"),
        ("watermark", 0.99, 1.0, "below 1"),
        ("watermark", 0.0, -0.25, "0"),
        ("max_num_waiting", 0, -1, "0"),
        ("async_depth", 1, 2, "0 or 1"),
        ("async_depth", 0, -1, "0 or 1"),
        ("scheduling_policy", "chunked", "fifo", "prefill_first, chunked"),
        ("preemption_mode", "swap", "drop", "recompute, swap"),
        ("preemption_policy", "priority", "oldest", "fcfs, priority, shortest_remaining, cheapest_recompute"),
    ],
)
def test_scheduler_limits(field: str, works: object, refused: object, named: str) -> None:
    scheduler_config(**{field: works})
    with pytest.raises(ConfigError) as error:
        scheduler_config(**{field: refused})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: is {refused!r}")
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("field", "works", "refused", "named"),
    [
        ("num_blocks", 1, 0, "1"),
        ("block_size", 1, 2, "1 or 16"),
        ("block_size", 16, 15, "1 or 16"),
        ("block_size", 32, 33, "32 or 48"),
        ("block_size", 64, -16, "1 or 16"),
        ("num_host_blocks", 0, -1, "0"),
        ("num_groups", 0, -1, "0"),
        ("prefix_index", "radix", "trie", "hash, radix"),
    ],
)
def test_cache_limits(field: str, works: object, refused: object, named: str) -> None:
    cache_config(**{field: works})
    with pytest.raises(ConfigError) as error:
        cache_config(**{field: refused})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}: is {refused!r}")
    assert named in str(error.value)


def test_budget_below_one_token_a_sequence_names_both_ways_out() -> None:
    with pytest.raises(ConfigError, match="at least 8 is needed, or max_num_seqs of at most 5"):
        scheduler_config(max_num_batched_tokens=5)


def test_secure_blocks_and_host_copies_exclude_each_other() -> None:
    cache_config(secure=True)
    cache_config(num_host_blocks=4)
    with pytest.raises(ConfigError, match=r"secure: is set with num_host_blocks 4: .* 0 is needed"):
        cache_config(secure=True, num_host_blocks=4)


def test_state_groups_exclude_prefix_caching() -> None:
    cache_config(num_groups=4, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"enable_prefix_caching: .* False is needed"):
        cache_config(num_groups=4)


def test_state_groups_exclude_swap() -> None:
    with pytest.raises(ConfigError, match=r"num_host_blocks: is 2 .* 0 is needed"):
        cache_config(num_groups=4, enable_prefix_caching=False, num_host_blocks=2)


def test_swap_needs_host_blocks() -> None:
    check_together(scheduler_config(preemption_mode="swap"), cache_config(num_host_blocks=1))
    with pytest.raises(ConfigError, match="num_host_blocks: is 0 with preemption_mode 'swap'; at least 1"):
        check_together(scheduler_config(preemption_mode="swap"), cache_config())


def test_every_sequence_that_may_run_needs_a_group() -> None:
    check_together(scheduler_config(), cache_config(num_groups=8, enable_prefix_caching=False))
    with pytest.raises(ConfigError, match=r"num_groups: is 7; at least max_num_seqs \(8\) is needed"):
        check_together(scheduler_config(), cache_config(num_groups=7, enable_prefix_caching=False))


def test_scheduler_itself_refuses_configs_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="num_host_blocks"):
        Engine(preemption_mode="swap")


@pytest.mark.parametrize(
    ("settings", "can_chunk"),
    [
        ({"scheduling_policy": "prefill_first"}, False),
        ({"scheduling_policy": "prefill_first", "max_prefill_chunk": 16}, True),
        ({"scheduling_policy": "chunked"}, True),
    ],
)
def test_when_prompts_may_be_split(settings: dict, can_chunk: bool) -> None:
    assert scheduler_config(**settings).can_chunk is can_chunk


def test_configs_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(AttributeError):
        scheduler_config().max_num_seqs = 0  # type: ignore[misc]


def test_defaults_work_and_are_those_of_the_design() -> None:
    config = SchedulerConfig(max_model_len=2048)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.scheduler_delay_factor) == (512, 16384, 0.0)
    assert (config.scheduling_policy, config.preemption_mode, config.preemption_policy) == (
        "prefill_first",
        "recompute",
        "fcfs",
    )
    assert CacheConfig(num_blocks=1).block_size == 16
