"""Keys, salts, grammars and tokens stay out of the worker's log at every level, also where something fails."""

import logging

import grpc
import pytest

from fissile.channel import KeyedChannel, aio_channel
from fissile.v1 import DrainRequest, FinishReason, GetWorkerRequest, SamplingParams, StructuredOutput, WorkerServiceStub
from tests.worker.harness import Router, run_worker, sequence, until
from worker.face.broker import Broker
from worker.grammars.errors import GrammarError

MARK = "xyzzy"
TOKENS = [77, 88, 77, 88]
KEYS = {"router_key": f"router-{MARK}-router", "operator_key": f"operator-{MARK}-operator"}


def marked(id: int, **fields):
    sampling = SamplingParams(structured_output=StructuredOutput(regex=MARK))
    return sequence(id, TOKENS, sampling=sampling, ignore_eos=False, cache_salt=MARK.encode(), **fields)


@pytest.fixture
def logged(caplog, capfd):
    formatter = logging.Formatter("%(message)s %(args)s")

    def text() -> str:
        return "\n".join([formatter.format(record) for record in caplog.records] + list(capfd.readouterr()))

    with caplog.at_level(logging.DEBUG):
        yield text


async def code_of(call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code().name


def test_requests_and_faults(logged, monkeypatch):
    def broken(*_args):
        raise KeyError(MARK, TOKENS)

    async def scenario(system):
        system.executor.grammars.compiles_at_once = False
        codes = []
        async with aio_channel(system.address) as channel:
            stub = WorkerServiceStub(KeyedChannel(channel, KEYS["router_key"]))
            router = Router(stub.Execute())
            await router.send(marked(1), sequence(2, TOKENS, max_tokens=None, cache_salt=MARK.encode()))
            await until(lambda: len(system.executor.grammars.compiles) == 1)
            (compiling,) = system.executor.grammars.compiles.values()
            compiling.set_exception(GrammarError(f"unclosed group in {MARK}"))
            await router.finish(1, 2)
            for key in (KEYS["router_key"], MARK * 4):
                other = WorkerServiceStub(KeyedChannel(channel, key))
                codes.append(await code_of(other.Drain(DrainRequest())))
            monkeypatch.setattr(Broker, "handle", broken)
            call = stub.Execute()
            await Router(call).send(marked(3))
            codes.append(await code_of(call.read()))
            assert (await stub.GetWorker(GetWorkerRequest())).epoch
        return [router.ended[i].finish_reason for i in (1, 2)], codes

    reasons, codes = run_worker(scenario, **KEYS)
    assert reasons == [FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_MODEL_LENGTH]
    assert codes == ["PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL"]
    text = logged()
    assert "in broken" in text and "KeyError" in text
    assert MARK not in text and "77, 88" not in text
