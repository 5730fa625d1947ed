"""What a worker says about itself, its tokenizer, its load and its cache; and its metrics."""

import asyncio
import hashlib
import socket
import urllib.request
from pathlib import Path

import grpc
import pytest

from common.block_hash import HASH_SCHEME
from fissile.v1 import (
    ClearPrefixCacheRequest,
    GetLoadRequest,
    GetTokenizerRequest,
    GetWorkerRequest,
    StartProfileRequest,
    StopProfileRequest,
    WorkerLoad,
)
from tests.worker.fake_executor import EOS
from tests.worker.harness import TOKENIZER, connect, run_all, run_worker, sequence, until
from worker.core.outputs import LoadSnapshot
from worker.face.convert_outputs import load_to_pb


def test_it_says_what_it_is():
    async def scenario(system):
        return await system.stub.GetWorker(GetWorkerRequest())

    first, second = (
        run_worker(scenario, dp_rank=1, dp_size=2, served_model_name=["smollm2", "chat"], model_version="v2")
        for _ in range(2)
    )
    assert (first.model, list(first.model_aliases)) == ("smollm2", ["chat"])
    assert list(first.architectures) == ["FakeForCausalLM"]
    assert (first.max_model_len, first.vocab_size, first.block_size, first.num_blocks) == (64, 100, 16, 64)
    assert (first.dp_rank, first.dp_size, first.tp_size) == (1, 2, 1)
    assert (first.hash_scheme, first.tokenizer_fingerprint) == (HASH_SCHEME, TOKENIZER.fingerprint)
    assert (first.model_fingerprint, first.model_version) == ("f1", "v2")
    assert (first.dtype, first.device, list(first.eos_token_ids)) == ("float32", "cpu", [EOS])
    assert first.epoch and first.epoch != second.epoch


@pytest.mark.parametrize("group", ["", "group-1"])
def test_it_says_whom_it_steps_together_with(group):
    def prepare(executor):
        executor.lockstep_group = group

    async def scenario(system):
        await system.loaded
        return (await system.stub.GetWorker(GetWorkerRequest())).lockstep_group

    assert run_worker(scenario, prepare) == group


def test_the_tokenizer_arrives_whole_in_parts_with_checksums():
    async def scenario(system):
        return [part async for part in system.stub.GetTokenizer(GetTokenizerRequest())]

    parts = run_worker(scenario)
    files: dict[str, bytes] = {}
    for part in parts:
        assert len(part.data) <= 1024 * 1024
        files[part.name] = files.get(part.name, b"") + part.data
        if part.sha256:
            assert part.sha256 == hashlib.sha256(files[part.name]).hexdigest()
    assert files == TOKENIZER.files
    assert [bool(part.sha256) for part in parts] == [True, False, False, True]
    assert [part.fingerprint for part in parts] == ["", "", "", TOKENIZER.fingerprint]


def test_the_load_counts():
    prompt = list(range(20, 60))

    async def scenario(system):
        await run_all(system, sequence(1, prompt))
        before = await system.stub.GetLoad(GetLoadRequest())
        await run_all(system, sequence(1, prompt))
        return before, await system.stub.GetLoad(GetLoadRequest())

    before, after = run_worker(scenario)
    assert after.step > before.step
    assert after.load.num_generated_tokens - before.load.num_generated_tokens == 4
    assert after.load.num_prefix_hits - before.load.num_prefix_hits == 32
    assert (after.load.num_blocks, after.load.num_used_blocks) == (64, 0)
    assert after.uptime.ToNanoseconds() > 0


def test_each_number_of_the_load_that_the_contract_has_is_told():
    numbers = {name: number for number, name in enumerate(LoadSnapshot._fields, 1)}
    told = load_to_pb(LoadSnapshot(**(numbers | {"accepted_counts": ()})))
    contract = [field.name for field in WorkerLoad.DESCRIPTOR.fields]
    assert {name: getattr(told, name) for name in contract} == {name: numbers[name] for name in contract}


def test_a_cleared_cache_is_not_hit():
    prompt = list(range(20, 60))

    async def scenario(system):
        await run_all(system, sequence(1, prompt))
        cleared = (await system.stub.ClearPrefixCache(ClearPrefixCacheRequest())).num_blocks
        return cleared, (await run_all(system, sequence(1, prompt))).ended[1].num_cached_tokens

    # Two full blocks of the sequence and one of the warm-up request.
    assert run_worker(scenario) == (3, 0)


async def _clear(system):
    return await system.stub.ClearPrefixCache(ClearPrefixCacheRequest())


def test_a_cache_in_use_is_kept():
    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1))
        await until(lambda: system.server._broker.num_open == 1)
        clear = asyncio.ensure_future(_clear(system))
        await until(lambda: system.server._engine._calls or clear.done())
        system.executor.open.set()
        cleared = (await clear).num_blocks
        await router.finish(1)
        return cleared

    assert run_worker(scenario) == 1, "the warm-up request's block; the running sequence keeps its own"


def test_a_profile_is_started_and_stopped_and_its_trace_named(tmp_path):
    async def scenario(system):
        await system.stub.StartProfile(StartProfileRequest(output_dir=str(tmp_path)))
        return (await system.stub.StopProfile(StopProfileRequest())).path

    path = Path(run_worker(scenario))
    assert path.parent == tmp_path


def test_profiles_that_cannot_be_are_refused():
    async def scenario(system):
        codes = []
        for call in (
            system.stub.StopProfile(StopProfileRequest()),
            system.stub.StartProfile(StartProfileRequest(output_dir="/dev/null/x")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            codes.append(refused.value.code().name)
        return codes

    assert run_worker(scenario) == ["FAILED_PRECONDITION", "INVALID_ARGUMENT"]


def test_metrics_are_served():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def scenario(system):
        await run_all(system, sequence(1), sequence(2, max_tokens=0))
        return (await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics")).read().decode()

    lines = run_worker(scenario, metrics_port=port, served_model_name=["toy", "alias"]).splitlines()
    # The warm-up request does not count.
    for line in (
        'fissile_worker_sequences_total{end="length",model="toy"} 1.0',
        'fissile_worker_sequences_total{end="refused_invalid_argument",model="toy"} 1.0',
        'fissile_worker_generated_tokens_total{model="toy"} 4.0',
        'fissile_worker_scheduled_tokens_total{model="toy"} 8.0',
        'fissile_worker_steps_total{model="toy"} 4.0',
        'fissile_worker_step_seconds_count{model="toy"} 4.0',
        'fissile_worker_queued_seconds_count{model="toy"} 1.0',
        'fissile_worker_running_sequences{model="toy"} 0.0',
        'fissile_worker_used_blocks{model="toy"} 0.0',
    ):
        assert line in lines
