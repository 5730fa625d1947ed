"""A worker that drains, is taken back, or shuts down."""

import asyncio

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2

from fissile.v1 import DrainRequest, FinishReason, UndrainRequest
from tests.worker.harness import (
    NOT_SERVING,
    SERVING,
    connect,
    health,
    quiet,
    run_all,
    run_worker,
    sequence,
    until,
    until_health,
)

ABORTED, ERROR, LENGTH = (
    FinishReason.FINISH_REASON_ABORTED,
    FinishReason.FINISH_REASON_ERROR,
    FinishReason.FINISH_REASON_LENGTH,
)


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
        router = connect(system)  # gRPC may end a call that nobody holds
        await router.send(sequence(1))
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
