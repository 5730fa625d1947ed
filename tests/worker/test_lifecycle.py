"""Health, and what happens when the device or the engine is lost."""

import asyncio
import time

import grpc
import pytest
from google.rpc import code_pb2

from fissile.v1 import FinishReason, GetTokenizerRequest, GetWorkerRequest
from tests.worker.harness import (
    FILES,
    NOT_SERVING,
    SERVING,
    connect,
    health,
    run_all,
    run_worker,
    sequence,
    until,
    until_health,
)

ERROR, LENGTH = FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_LENGTH


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
