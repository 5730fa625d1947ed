"""`fissile drain` and `fissile undrain` against a worker."""

import asyncio

import pytest
from click.testing import CliRunner

from fissile.cli import main
from fissile.v1 import UndrainRequest
from tests.worker.harness import NOT_SERVING, SERVING, connect, health, run_worker, sequence, until, until_health


async def command(*arguments, **environment):
    """Its exit code and what it printed. One at a time: each takes standard output for itself."""
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=environment)
    return result.exit_code, result.output


def test_a_worker_is_drained_and_undrained():
    async def scenario(system):
        drained = await command("drain", system.address)
        between = await health(system)
        undrained = await command("undrain", system.address)
        return drained, between, undrained, await health(system), system.address

    drained, between, undrained, after, address = run_worker(scenario)
    assert (drained, between) == ((0, "0 sequences finished, 0 aborted\n"), NOT_SERVING)
    assert (undrained, after) == ((0, f"{address} takes requests\n"), SERVING)


def test_a_drain_that_is_undone_says_so_and_one_with_a_timeout_aborts():
    async def scenario(system):
        system.executor.open.clear()
        router = connect(system)
        await router.send(sequence(1))
        await until(lambda: system.server._broker.num_open == 1)
        drain = asyncio.create_task(command("drain", system.address))
        await until_health(system, NOT_SERVING)
        await system.stub.Undrain(UndrainRequest())
        undone = await drain
        system.executor.open.set()
        await router.finish(1)
        await router.send(sequence(2, max_tokens=100_000))
        await until(lambda: system.server._broker.num_open == 1)
        return undone, await command("drain", "--timeout", "0", system.address), system.address

    undone, aborted, address = run_worker(scenario, max_model_len=200_000, num_blocks=20_000, max_num_seqs=4)
    assert undone == (1, f"0 sequences finished, 0 aborted\nError: {address} was undrained meanwhile\n")
    assert aborted == (0, "0 sequences finished, 1 aborted\n")


def test_the_operators_key_is_shown_and_without_it_nothing_happens():
    key = "operator-operator-op"

    async def scenario(system):
        return [
            await command("drain", system.address),
            await command("drain", system.address, FISSILE_OPERATOR_KEY=key),
            await command("undrain", system.address, "--operator-key", key),
        ]

    refused, drained, undrained = run_worker(scenario, operator_key=key, router_key="router-router-router")
    assert refused[0] == 1 and refused[1].startswith("Error: unauthenticated: a key or a certificate of a router")
    assert (drained[0], undrained[0]) == (0, 0)


@pytest.mark.parametrize(
    "arguments", [("generate", "x", "--address"), ("stats", "--address")], ids=["stream", "answer"]
)
def test_a_worker_where_a_router_is_meant(arguments):
    async def scenario(system):
        return await command(*arguments, system.address)

    code, output = run_worker(scenario)
    assert code == 1 and output.startswith("Error: unimplemented: the server there has no such method: is it a router")


def test_no_worker_there():
    async def scenario():
        return await command("undrain", "127.0.0.1:1")

    assert asyncio.run(scenario()) == (1, "Error: no worker at 127.0.0.1:1. WORKER is its HOST:PORT.\n")
