"""Processes that are killed and restarted."""

import os
import signal
import time

import pytest

from fissile import Client
from fissile.errors import UnavailableError
from fissile.healthcheck import health
from tests.e2e.conftest import WORKER_ARGUMENTS

STORY = "Once upon a time, in a small village by the sea,"


def collect(tokens, stream):
    for delta in stream:
        tokens[delta.index] += delta.token_ids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_workers_streams_go_on_elsewhere_token_for_token(cluster, services, number):
    """Killed, or told to leave at once: three completions of a prompt are resumed where each of them was (E6)."""
    victim, victim_address = services.start("victim", "worker", *WORKER_ARGUMENTS, "--drain-timeout", "0")
    survivor = next(iter(cluster.workers.values()))
    workers = f"{victim_address},{survivor}"
    _, address = services.start("router", "router", "--workers", workers, "--policy", "least_loaded")
    options = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "n": 3}
    with Client(address) as client:
        deadline = time.monotonic() + 10
        while sum(worker.healthy for worker in client.stats().workers) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # Two at once, so that one of them is on the victim; one greedy, one sampled.
        streams = [client.generate(STORY, temperature=t, seed=3, **options) for t in (0.0, 0.8)]
        tokens = [{index: [] for index in range(3)} for _ in streams]
        for stream, found in zip(streams, tokens, strict=True):
            while not all(found.values()):
                collect(found, [next(stream)])
        os.kill(victim.pid, number)
        for stream, found in zip(streams, tokens, strict=True):
            collect(found, stream)
        for temperature, found in zip((0.0, 0.8), tokens, strict=True):
            whole = client.generate(STORY, temperature=temperature, seed=3, **options).result()
            assert found == {completion.index: list(completion.token_ids) for completion in whole.completions}
    deadline = time.monotonic() + 20
    while victim.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert victim.exit_code == (0 if number == signal.SIGTERM else -signal.SIGKILL)


def test_without_any_worker_left_a_request_fails_at_last(services):
    worker, worker_address = services.start("worker", "worker", *WORKER_ARGUMENTS)
    _, address = services.start("router", "router", "--workers", worker_address, "--worker-wait", "1")
    with Client(address) as client:
        stream = client.generate(STORY, max_tokens=500, ignore_eos=True)
        next(stream)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            stream.result()
    assert health(address) == "NOT_SERVING"


def test_restarted_worker_is_found_again(services):
    worker, worker_address = services.start("worker", "worker", *WORKER_ARGUMENTS)
    _, address = services.start("router", "router", "--workers", worker_address, "--worker-wait", "30")
    os.kill(worker.pid, signal.SIGKILL)
    services.start("again", "worker", *WORKER_ARGUMENTS, port=int(worker_address.rpartition(":")[2]))
    with Client(address) as client:
        assert client.generate(STORY, max_tokens=2).result().usage.num_completion_tokens == 2


def test_killed_router_loses_nothing_of_the_workers(cluster, services, idle):
    workers = ",".join(cluster.workers.values())
    router, address = services.start("router", "router", "--workers", workers)
    with Client(address) as client:
        stream = client.generate(STORY, max_tokens=1500, ignore_eos=True)
        next(stream)
        os.kill(router.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            stream.result()
    idle()
    port = int(address.rpartition(":")[2])
    services.start("router-again", "router", "--workers", workers, port=port)
    with Client(address) as client:
        assert client.generate(STORY, max_tokens=2).result().usage.num_completion_tokens == 2
