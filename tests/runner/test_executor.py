"""The executor with real processes: results, order, failure, death, time-outs, orphans."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from common.version import package_version
from tests.leaks import leaving_nothing_open
from tests.runner.conftest import greedy_reference, random_prompt
from tests.runner.executors import WAIT, alive, driver_of, rank_pid, running, tiny_config
from worker.executor.errors import ExecutorDiedError, ExecutorStartError, ExecutorTimeoutError
from worker.executor.executor import Executor
from worker.executor.local import LocalRanks
from worker.executor.rank_process import RankProcess
from worker.executor.remote import RemoteRanks
from worker.processes.messages import receive, send
from worker.processes.tcp import TcpConnection, connect
from worker.runner.messages import Failed, Join, Setup


@pytest.fixture
def executor(tiny: tuple[Path, LlamaForCausalLM]) -> Iterator[Executor]:
    """One that a test may hurt."""
    with running(tiny_config(tiny[0])) as started:
        yield started


@pytest.fixture(scope="module")
def shared(tiny: tuple[Path, LlamaForCausalLM]) -> Iterator[Executor]:
    """One of all tests that leave it as it is: starting takes most of the time."""
    with running(tiny_config(tiny[0])) as started:
        yield started


@pytest.fixture(scope="module")
def shared_pair(tiny: tuple[Path, LlamaForCausalLM]) -> Iterator[Executor]:
    """The same of two ranks."""
    with running(tiny_config(tiny[0], tensor_parallel_size=2)) as started:
        yield started


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def test_greedy_tokens_equal_transformers(shared: Executor, tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = driver_of(shared)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=15)
    assert [seq.output for seq in seqs] == [greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], 16) for seq in seqs]


def test_steps_are_queued_ahead_with_tokens_that_only_the_device_knows(
    shared: Executor, tiny: tuple[Path, LlamaForCausalLM]
) -> None:
    driver = driver_of(shared)
    seq = driver.add(random_prompt(10, 1))
    work = [[(seq, 10)], *[[(seq, 1)]] * 9]
    for rows in work:
        shared.submit(driver.batch(rows))
    outputs = [shared.collect(WAIT) for _ in work]
    assert [output.step for output in outputs] == list(range(10))
    assert [output.token_ids[0][0] for output in outputs] == greedy_reference(tiny[1], seq.tokens, 10)


def test_killed_rank_is_an_error_with_the_signal(executor: Executor) -> None:
    driver = driver_of(executor)
    os.kill(rank_pid(executor), signal.SIGKILL)
    seq = driver.add([1, 2, 3])
    with pytest.raises(ExecutorDiedError, match="killed by signal 9"):
        driver.prefill(seq)


def test_fault_in_a_step_is_an_error_with_its_traceback(executor: Executor) -> None:
    driver = driver_of(executor)
    with pytest.raises(ExecutorDiedError, match=r"step 0 failed(.|\n)*index out of range"):
        driver.prefill(driver.add([10_000]))


def test_rank_that_does_not_answer_is_a_timeout(shared: Executor) -> None:
    driver = driver_of(shared)
    os.kill(rank_pid(shared), signal.SIGSTOP)
    shared.submit(driver.batch([(driver.add([1, 2]), 2)]))
    with pytest.raises(ExecutorTimeoutError, match="answer step 0"):
        shared.collect(0.2)
    os.kill(rank_pid(shared), signal.SIGCONT)
    assert shared.collect(WAIT).step == 0


def test_a_stopped_rank_is_ended(executor: Executor) -> None:
    os.kill(rank_pid(executor), signal.SIGSTOP)
    driver = driver_of(executor)
    executor.submit(driver.batch([(driver.add([1, 2]), 2)]))
    with pytest.raises(ExecutorDiedError, match="rank 0 stood still: nothing was heard of it for 2 s"):
        executor.collect(WAIT)


def test_ranks_that_hang_with_a_lost_one_are_killed_at_once(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stands still in the midst of a collective, and the other dies: nobody waits for the first to stop."""
    monkeypatch.setattr("worker.executor.executor.STOP_SECONDS", 10 * WAIT)
    executor = Executor(tiny_config(tiny[0], tensor_parallel_size=2))
    executor.start(WAIT)
    pids = [rank_pid(executor, rank) for rank in range(2)]
    try:
        os.kill(pids[1], signal.SIGSTOP)
        driver = driver_of(executor)
        executor.submit(driver.batch([(driver.add([1, 2]), 2)]))
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorDiedError, match="rank 0 was killed by signal 9"):
            executor.collect(WAIT)
    finally:
        executor.shutdown()
    for pid in pids:
        wait_until_gone(pid)


@pytest.fixture
def joined(tiny: tuple[Path, LlamaForCausalLM]) -> Iterator[tuple[Executor, int]]:
    """An executor of two ranks, and the process of the second, which was started by hand."""
    secret = "the secret of ranks"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    remote = RemoteRanks(count=1, host="127.0.0.1", port=port, secret=secret.encode())
    executor = Executor(tiny_config(tiny[0], tensor_parallel_size=2), remote=remote)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "1"}
    environment = os.environ | variables | {"LOCAL_RANK": "0", "FISSILE_RANKS_SECRET": secret}
    process = subprocess.Popen([sys.executable, "-m", "fissile.service", "worker.join"], env=environment)
    try:
        executor.start(WAIT)
        yield executor, process.pid
    finally:
        executor.shutdown()
        process.wait(WAIT)


def test_a_rank_that_was_started_elsewhere_gives_the_tokens_of_one(
    joined: tuple[Executor, int], tiny: tuple[Path, LlamaForCausalLM]
) -> None:
    driver = driver_of(joined[0])
    seq = driver.add(random_prompt(30, 1))
    driver.prefill(seq)
    driver.decode(seq, steps=31)
    assert seq.output == greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], 32)


def test_the_end_of_a_rank_that_was_started_elsewhere_ends_those_that_hang_with_it(
    joined: tuple[Executor, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.executor.executor.STOP_SECONDS", 10 * WAIT)
    executor, remote_pid = joined
    os.kill(remote_pid, signal.SIGSTOP)
    driver = driver_of(executor)
    executor.submit(driver.batch([(driver.add([1, 2]), 2)]))
    os.kill(remote_pid, signal.SIGKILL)
    with pytest.raises(ExecutorDiedError):  # seen here, or by the rank that waits for it
        executor.collect(WAIT)
    pid = rank_pid(executor)
    executor.shutdown()
    assert not alive(pid)


def test_what_is_wrong_on_another_host_is_said_with_the_rank(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    secret = b"the secret of ranks"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    remote = RemoteRanks(count=1, host="127.0.0.1", port=port, secret=secret)
    executor = Executor(tiny_config(tiny[0], tensor_parallel_size=2), remote=remote)

    def join() -> TcpConnection:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            try:
                return connect("127.0.0.1", port, secret)
            except ConnectionRefusedError:  # not yet
                time.sleep(0.01)
        raise TimeoutError

    def fail() -> None:
        with closing(join()) as connection:
            send(connection, Join(1, 2, package_version()))
            assert isinstance(receive(connection), Setup)
            send(connection, Failed("no model 'm'", expected=True))

    failing = threading.Thread(target=fail)
    failing.start()
    with pytest.raises(ExecutorStartError, match=r"^rank 1, on its host: no model 'm'$"):
        executor.start(WAIT)
    assert executor._ranks == []
    failing.join()


def test_collect_without_a_step_is_refused(shared: Executor) -> None:
    with pytest.raises(RuntimeError, match="no step is in flight"):
        shared.collect(0.1)


def test_shutdown_ends_the_ranks_and_can_be_repeated(executor: Executor) -> None:
    pid = rank_pid(executor)
    executor.shutdown()
    assert not alive(pid)
    executor.shutdown()


def test_model_that_does_not_exist_is_a_message_for_the_user() -> None:
    executor = Executor(tiny_config("/no/such/model"))
    with pytest.raises(ExecutorStartError, match="no model '/no/such/model'"):
        executor.start(WAIT)


def test_start_has_a_timeout_and_leaves_no_process(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    executor = Executor(tiny_config(tiny[0]))
    with pytest.raises(ExecutorTimeoutError, match="start"):
        executor.start(0.05)
    assert executor._ranks == []


def test_ranks_may_run_before_their_executor_starts(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """Of two, which meet through the socket that was there first."""
    config = tiny_config(tiny[0], tensor_parallel_size=2)
    with LocalRanks(config) as local:
        pids = [rank.pid for rank in local.ranks]
        executor = Executor(config, local=local)
        executor.start(WAIT)
        assert [rank_pid(executor, rank) for rank in range(2)] == pids
        executor.shutdown()


def test_rank_0_may_run_before_anything_else_is_known(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    config = tiny_config(tiny[0])
    with RankProcess() as first, LocalRanks(config, first=first) as local:
        executor = Executor(config, local=local)
        executor.start(WAIT)
        assert rank_pid(executor, 0) == first.popen.pid
        executor.shutdown()


@leaving_nothing_open()
def test_a_process_that_cannot_hold_the_store_is_ended() -> None:
    with RankProcess() as first:
        local = LocalRanks(tiny_config("/no/such/model", tensor_parallel_size=2), first=first)
        assert first.popen.wait(WAIT) == -signal.SIGKILL
        local.store.close()


@leaving_nothing_open()
def test_ranks_that_no_executor_starts_are_gone_at_the_end() -> None:
    with LocalRanks(tiny_config("/no/such/model", tensor_parallel_size=2)) as local:
        pids = [rank.pid for rank in local.ranks]
        assert all(pid is not None and alive(pid) for pid in pids)
    for pid in pids:
        assert pid is not None
        wait_until_gone(pid)


PARENT = """
import sys, time
from worker.executor.executor import Executor
from worker.executor.local import LocalRank
from worker.executor.remote import RemoteRanks
from worker.runner.config import RunnerConfig
if __name__ == "__main__":
    executor = Executor(RunnerConfig(model=sys.argv[1], device="cpu", num_blocks=8, max_num_seqs=2, num_threads=1))
    executor.start(60)
    print(executor._ranks[0]._transport.pid, flush=True)
    time.sleep(600)
"""


def test_orphans_die_with_their_parent(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_until_gone(pid)


def test_two_executors_on_one_host_do_not_clash(shared: Executor, tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with running(tiny_config(tiny[0])) as other:
        drivers = driver_of(shared), driver_of(other)
        outputs = [driver.prefill(driver.add([7, 8, 9])).token_ids for driver in drivers]
    assert outputs[0] == outputs[1]


def test_two_ranks_give_the_tokens_of_one(shared_pair: Executor, tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = driver_of(shared_pair)
    seqs = [driver.add(random_prompt(n, n)) for n in (9, 30)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=63)
    for seq in seqs:
        assert seq.output == greedy_reference(tiny[1], seq.tokens[: seq.num_prompt], 64)


def test_traces_of_all_ranks_have_the_phases_of_their_steps(shared_pair: Executor, tmp_path: Path) -> None:
    driver = driver_of(shared_pair)
    seq = driver.add(random_prompt(5, 1))
    driver.prefill(seq)
    shared_pair.profiles.start(str(tmp_path))
    driver.decode(seq, steps=2)
    path = shared_pair.profiles.stop()
    driver.decode(seq, steps=1)
    traces = sorted(tmp_path.iterdir())
    assert str(traces[0]) == path
    assert len(traces) == 2
    for trace in traces:
        events = sorted(json.loads(trace.read_text())["traceEvents"], key=lambda event: float(event["ts"]))
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        phases = ["prepare", "run", "postprocess"]
        ours = [name for name in names if name.startswith("step") or name in phases]
        assert ours == ["step 1, 1 rows", *phases, "step 2, 1 rows", *phases]


def test_death_of_another_rank_is_noticed_while_rank_0_waits_for_it(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with running(tiny_config(tiny[0], tensor_parallel_size=2)) as executor:
        os.kill(rank_pid(executor, 1), signal.SIGKILL)
        driver = driver_of(executor)
        with pytest.raises(ExecutorDiedError):
            driver.prefill(driver.add([1, 2, 3]))
