"""Settings: what cannot work is one clear line and exit code 2, before anything is loaded."""

import pytest

from common.config import parse_settings
from worker.config import WorkerSettings


def parse(*argv):
    return parse_settings(WorkerSettings, list(argv), "worker")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "worker: --port: "),
        (["--dp-rank", "2", "--dp-size", "2"], "--dp-rank 2 is not below --dp-size 2"),
        (["--tls-key", "key.pem"], "--tls-certificate and --tls-key go together"),
        (["--preemption-mode", "swap"], "--preemption-mode swap needs --swap-space-gib above 0"),
        (["--block-size", "24"], "block_size: is 24; 1 or a multiple of 16 is needed, such as 16 or 32"),
        (["--max-num-batched-tokens", "100"], "max_num_seqs of at most 100"),
        (["--max-prefill-chunk", "99999"], "max_prefill_chunk: is 99999"),
        (["--secure-kv", "--swap-space-gib", "1"], "secure: is set with num_host_blocks"),
    ],
)
def test_what_cannot_work_is_named(argv, said, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(*argv)
    printed = capsys.readouterr().err
    assert exited.value.code == 2
    assert said in printed and printed.count("\n") == 1


def test_flags_reach_scheduler_cache_and_runner():
    settings = parse(
        "--max-num-seqs", "7", "--block-size", "32", "--no-enable-prefix-caching", "--no-async-scheduling",
        "--max-prefill-chunk", "64", "--num-blocks", "9", "--dtype", "bfloat16",
    )  # fmt: skip
    scheduler, cache, runner = settings.scheduler_config(100), settings.cache_config(9, 0), settings.runner_config()
    assert (scheduler.max_num_seqs, scheduler.async_depth, scheduler.max_prefill_chunk) == (7, 0, 64)
    assert (cache.block_size, cache.enable_prefix_caching, cache.num_blocks) == (32, False, 9)
    assert (runner.max_num_seqs, runner.block_size, runner.num_blocks, runner.dtype) == (7, 32, 9, "bfloat16")


def test_every_setting_has_a_description_and_a_variable(monkeypatch):
    assert all(field.description for field in WorkerSettings.model_fields.values())
    monkeypatch.setenv("FISSILE_WORKER_MAX_NUM_SEQS", "3")
    assert parse().max_num_seqs == 3
