"""Health, draining, and what happens when the device or the engine is lost."""

import asyncio
import gc
import socket
import threading
import time

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fissile.channel import aio_channel
from fissile.v1 import DrainRequest, FinishReason, GetTokenizerRequest, GetWorkerRequest, UndrainRequest
from tests.worker.fake_executor import FakeExecutor
from tests.worker.harness import FILES, connect, quiet, run_all, run_worker, sequence, until
from worker.config import WorkerSettings
from worker.errors import WorkerFailedError
from worker.executor.errors import ExecutorStartError
from worker.server import WorkerServer
from worker.serving import run_until_stopped

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ABORTED, ERROR, LENGTH = (
    FinishReason.FINISH_REASON_ABORTED,
    FinishReason.FINISH_REASON_ERROR,
    FinishReason.FINISH_REASON_LENGTH,
)


async def health(system, service=""):
    async with aio_channel(system.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_health(system, status):
    async with asyncio.timeout(20):
        while await health(system) != status:
            await asyncio.sleep(0.002)


def test_health_is_up_only_once_a_request_would_succeed():
    async def scenario(system):
        loading = await health(system)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await system.stub.GetWorker(GetWorkerRequest())
        early = await connect(system).end()
        system.executor.loading.set()
        await until_health(system, SERVING)
        router = await run_all(system, sequence(1))
        named = await health(system, "fissile.v1.WorkerService")
        return loading, refused.value.code().name, early, named, router.ended[1].finish_reason

    answer = run_worker(scenario, prepare=lambda executor: executor.loading.clear())
    early = ("UNAVAILABLE", "the model is still loading")
    assert answer == (NOT_SERVING, "UNAVAILABLE", early, SERVING, LENGTH)


def test_the_tokenizer_is_told_of_while_the_model_loads():
    async def scenario(system):
        while True:
            try:
                return [part.fingerprint async for part in system.stub.GetTokenizer(GetTokenizerRequest())]
            except grpc.aio.AioRpcError as refused:
                assert refused.details() == "the model is still loading"
                await asyncio.sleep(0.01)

    parts = run_worker(scenario, prepare=lambda executor: executor.loading.clear())
    assert parts[-1] == FILES.tokenizer.fingerprint


def test_drain_finishes_what_runs_and_refuses_what_comes():
    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1), sequence(2))
        await until(lambda: system.server._broker.num_open == 2)
        drain = asyncio.create_task(_drain(system))
        await until(lambda: system.server._broker._door._refusal is not None)
        status = await health(system)
        await router.send(sequence(3))
        late = await connect(system).end()
        system.executor.open.set()
        await router.finish(1, 2, 3)
        return router, await drain, status, late

    router, result, status, late = run_worker(scenario)
    assert (result.num_finished, result.num_aborted) == (2, 0)
    assert [router.ended[id].finish_reason for id in (1, 2, 3)] == [LENGTH, LENGTH, ERROR]
    assert (router.ended[3].error_code, router.ended[3].detail) == (code_pb2.UNAVAILABLE, "the worker is draining")
    assert status == NOT_SERVING
    assert late == ("UNAVAILABLE", "the worker is draining")


async def _drain(system, seconds=None):
    request = DrainRequest()
    if seconds is not None:
        request.timeout.CopyFrom(duration_pb2.Duration(nanos=int(seconds * 1e9)))
    return await system.stub.Drain(request)


def test_drain_aborts_what_does_not_finish_in_time():
    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1, max_tokens=100_000), sequence(2, max_tokens=2))
        await router.finish(2)
        result = await _drain(system, 0.05)
        await router.finish(1)
        await quiet(system)
        return router, result

    router, result = run_worker(scenario, max_model_len=200_000, num_blocks=20_000, max_num_seqs=4)
    assert (result.num_finished, result.num_aborted) == (0, 1)
    assert router.ended[1].finish_reason == ABORTED


def test_drain_refuses_a_time_that_is_none():
    """It would abort everything at once, where somebody has computed wrongly."""

    async def scenario(system):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _drain(system, -0.5)
        return raised.value, await run_all(system, sequence(1))

    error, router = run_worker(scenario)
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "timeout: is -0.5 s; 0 s or more is needed",
    )
    assert len(router.tokens[1]) == 4


def test_undrain_accepts_again_on_streams_that_stayed_and_on_new_ones():
    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1))
        await router.finish(1)
        result = await _drain(system)
        drained = await health(system)
        for _ in range(2):
            await system.stub.Undrain(UndrainRequest())
        late = await run_all(system, sequence(1))
        await router.send(sequence(2))
        await router.finish(2)
        return router, late, result, drained, await health(system)

    router, late, result, drained, undrained = run_worker(scenario)
    assert (result.num_finished, result.num_aborted, result.undrained) == (0, 0, False)
    assert (drained, undrained) == (NOT_SERVING, SERVING)
    assert [router.ended[2].finish_reason, late.ended[1].finish_reason] == [LENGTH, LENGTH]


def test_undrain_ends_a_drain_that_waits_and_what_runs_goes_on():
    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1), sequence(2))
        await until(lambda: system.server._broker.num_open == 2)
        drains = [asyncio.create_task(_drain(system)) for _ in range(2)]
        await until_health(system, NOT_SERVING)
        await system.stub.Undrain(UndrainRequest())
        results = [await drain for drain in drains]
        status = await health(system)
        await router.send(sequence(3))
        system.executor.open.set()
        await router.finish(1, 2, 3)
        again = await _drain(system)
        return router, results, status, again

    router, results, status, again = run_worker(scenario)
    assert [(r.num_finished, r.num_aborted, r.undrained) for r in results] == [(0, 0, True)] * 2
    assert (status, again.undrained) == (SERVING, False)
    assert [router.ended[id].finish_reason for id in (1, 2, 3)] == [LENGTH] * 3


def test_a_worker_that_shuts_down_cannot_be_undrained():
    async def scenario(system):
        system.executor.open.clear()
        await connect(system).send(sequence(1))
        await until(lambda: system.server._broker.num_open == 1)
        stopping = asyncio.create_task(system.server.stop())
        await until_health(system, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await system.stub.Undrain(UndrainRequest())
        status = await health(system)
        system.executor.open.set()
        await stopping
        return refused.value.details(), status

    assert run_worker(scenario) == ("the worker is shutting down", NOT_SERVING)


def test_shutdown_finishes_what_runs_then_ends_the_streams():
    async def scenario(system):
        router = connect(system)
        await router.send(sequence(1, max_tokens=40))
        await router.read_tokens(1, 1)
        stopping = asyncio.create_task(system.server.stop())
        end = await router.end()
        await stopping
        return router, end, system.executor.is_shut_down

    router, end, is_shut_down = run_worker(scenario)
    assert (router.ended[1].finish_reason, len(router.tokens[1])) == (LENGTH, 40)
    assert end == ("UNAVAILABLE", "the worker is shutting down")
    assert is_shut_down


def failing(break_it, **settings):
    """Two routers with open sequences, then a fault: what each router hears, and the server's state."""

    async def scenario(system):
        system.executor.open.clear()
        routers = [connect(system), connect(system)]
        await routers[0].send(sequence(1, max_tokens=50), sequence(2, max_tokens=50))
        await routers[1].send(sequence(1, max_tokens=50))
        await until(lambda: system.server._broker.num_open == 3)
        break_it(system)
        ends = [await router.end() for router in routers]
        await system.server.failed.wait()
        late = await connect(system).end()
        return routers, ends, str(system.server.failure), late, system.server._broker.num_open

    return run_worker(scenario, **settings)


def kill(system):
    system.executor.die()


def crash(system):
    """A fault of ours in the engine's own code."""
    system.executor.raises_in_submit = KeyError("a bug")
    system.executor.open.set()


def stick(system):
    """The same, of the kind that raises nothing."""

    def turn_without_end(_scheduler):
        while system.server.failure is None:
            time.sleep(0.001)

    system.server._engine.call(turn_without_end)
    system.executor.open.set()


def test_an_engine_that_stands_still_ends_every_sequence(monkeypatch):
    monkeypatch.setattr("worker.engine.watch.BEAT_SECONDS", 0.05)
    routers, ends, failure, _, num_open = failing(stick)
    assert [router.ended[1].error_code for router in routers] == [code_pb2.UNAVAILABLE] * 2
    assert (failure, num_open) == ("the engine's thread stands still", 0)
    assert ends == [("UNAVAILABLE", f"the worker failed: {failure}")] * 2


def test_an_engine_that_waits_for_a_long_step_or_for_work_does_not_stand_still(monkeypatch):
    monkeypatch.setattr("worker.engine.watch.BEAT_SECONDS", 0.01)

    async def scenario(system):
        await asyncio.sleep(0.2)
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1))
        await asyncio.sleep(0.2)
        system.executor.open.set()
        await router.finish(1)
        return system.server.failure

    assert run_worker(scenario) is None


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("break_it", "text"), [(kill, "rank 0 was killed by signal 9"), (crash, "'a bug'")])
def test_a_lost_engine_ends_every_sequence(break_it, text, async_scheduling):
    routers, ends, failure, late, num_open = failing(break_it, async_scheduling=async_scheduling)
    assert [sorted(router.ended) for router in routers] == [[1, 2], [1]]
    for router in routers:
        for output in router.ended.values():
            assert (output.finish_reason, output.error_code) == (ERROR, code_pb2.UNAVAILABLE)
            assert output.detail == f"the worker failed: {text}"
    assert ends == [("UNAVAILABLE", f"the worker failed: {text}")] * 2
    assert (failure, late, num_open) == (text, ends[0], 0)


def test_a_device_that_dies_at_idle_is_noticed_without_a_request():
    async def scenario(system):
        system.executor.die()
        async with asyncio.timeout(20):
            await system.server.failed.wait()
        return str(system.server.failure)

    assert run_worker(scenario) == "rank 0 was killed by signal 9"


def test_a_step_that_hangs_does_not_hang_the_shutdown(monkeypatch):
    monkeypatch.setattr("worker.face.broker.ABORT_SECONDS", 0.05)
    monkeypatch.setattr("worker.server.ENGINE_STOP_SECONDS", 0.05)

    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1))
        await until(lambda: system.server._broker.num_open == 1)
        stopping = asyncio.create_task(system.server.stop())
        end = await router.end()
        await stopping
        return router.ended[1], end

    output, end = run_worker(scenario, drain_timeout=0.05)
    assert (output.finish_reason, output.error_code) == (ERROR, code_pb2.UNAVAILABLE)
    assert end == ("UNAVAILABLE", "the worker is shutting down")


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


@pytest.mark.filterwarnings("error")
def test_a_taken_metrics_port_is_named_and_leaves_nothing_running():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} for metrics: Address already in use"):
            serve(FakeExecutor(), metrics_port=port)
        gc.collect()
