"""A worker's process: what is loaded beside what, and what ends it."""

import asyncio
import socket
import threading

import pytest

from tests.leaks import leaving_nothing_open
from tests.worker.fake_executor import FakeExecutor
from tests.worker.harness import FILES
from worker.config import WorkerSettings
from worker.errors import WorkerFailedError
from worker.executor.errors import ExecutorStartError
from worker.server import WorkerServer
from worker.serving import run_until_stopped


def serve(executor, read_files=lambda: FILES, stop_at_once=False, **options):
    """Until it fails, or is ready."""

    async def run():
        stop = asyncio.Event()
        if stop_at_once:
            stop.set()
        settings = WorkerSettings(port=0, drain_timeout=1.0, max_num_batched_tokens=2048, **options)

        def make(on_rank_end):
            executor._on_rank_end = on_rank_end
            return executor

        async with asyncio.timeout(30):
            await run_until_stopped(WorkerServer(settings, make, read_files), stop, on_ready=stop.set)

    asyncio.run(run())


def test_tokenizer_and_ranks_are_loaded_at_the_same_time():
    """Each is done only once the other has begun."""
    executor = FakeExecutor()
    executor.loading.clear()
    starting = threading.Event()
    start = executor.start

    def read_files():
        assert starting.wait(20)
        executor.loading.set()
        return FILES

    def observed_start():
        starting.set()
        return start()

    executor.start = observed_start
    serve(executor, read_files)


def test_a_model_that_cannot_be_loaded_ends_the_process():
    executor = FakeExecutor()
    executor.start_error = "no model 'x'"
    with pytest.raises(ExecutorStartError, match="no model 'x'"):
        serve(executor)


def test_a_warm_up_that_fails_ends_the_process():
    executor = FakeExecutor()
    executor.runner.failing_slots.update(range(1024))
    with pytest.raises(WorkerFailedError, match=r"the first request failed: .*not finite"):
        serve(executor, async_scheduling=False)


def test_what_is_to_be_done_once_it_is_ready_is_done():
    executor = FakeExecutor()
    serve(executor)
    assert executor.num_submitted > 0


def test_a_failure_ends_the_process():
    executor = FakeExecutor()
    executor.raises_in_submit = RuntimeError("broken")
    with pytest.raises(WorkerFailedError, match="broken"):
        serve(executor)


def test_a_signal_while_loading_does_not_wait_for_the_model():
    executor = FakeExecutor()
    executor.loading.clear()
    serve(executor, stop_at_once=True)
    assert not executor.is_shut_down
    executor.loading.set()


@leaving_nothing_open()
def test_a_taken_metrics_port_is_named_and_leaves_nothing_running():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for metrics: Address already in use"):
            serve(FakeExecutor(), metrics_port=port)
