"""Processes that are killed and restarted."""

import os
import signal
import time

import pytest

from fissile import Client
from fissile.errors import UnavailableError
from fissile.healthcheck import health

STORY = "Once upon a time, in a small village by the sea,"


def collect(tokens, stream):
    for delta in stream:
        tokens[delta.index] += delta.token_ids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_workers_streams_go_on_elsewhere_token_for_token(fleet, number):
    """Killed, or told to leave at once: three completions of a prompt are resumed where each of them was (E6)."""
    options = {"max_tokens": 600, "ignore_eos": True, "return_token_ids": True, "n": 3}
    with Client(fleet.addresses[0]) as client:
        # One greedy, one sampled.
        streams = [client.generate(STORY, temperature=t, seed=3, **options) for t in (0.0, 0.8)]
        tokens = [{index: [] for index in range(3)} for _ in streams]
        for stream, found in zip(streams, tokens, strict=True):
            while not all(found.values()):
                collect(found, [next(stream)])
        victim = next(worker for at, worker in enumerate(fleet.workers) if fleet.num_open(at, of_router=False))
        victim.signal(number)
        for stream, found in zip(streams, tokens, strict=True):
            collect(found, stream)
        for temperature, found in zip((0.0, 0.8), tokens, strict=True):
            whole = client.generate(STORY, temperature=temperature, seed=3, **options).result()
            assert found == {completion.index: list(completion.token_ids) for completion in whole.completions}
    deadline = time.monotonic() + 20
    while victim.child.exit_code is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert victim.child.exit_code == (0 if number == signal.SIGTERM else -signal.SIGKILL)


def test_without_any_worker_left_a_request_fails_at_last(fleet, services):
    worker = fleet.workers[0]
    _, address = services.start("router", "router", "--workers", worker.address, "--worker-wait", "1")
    with Client(address) as client:
        stream = client.generate(STORY, max_tokens=3000, ignore_eos=True)
        next(stream)
        worker.signal(signal.SIGKILL)
        with pytest.raises(UnavailableError):
            stream.result()
    assert health(address) == "NOT_SERVING"


def test_restarted_worker_is_found_again(fleet, services):
    """By a request that waits for it."""
    worker = fleet.workers[0]
    _, address = services.start("router", "router", "--workers", worker.address, "--worker-wait", "30")
    worker.signal(signal.SIGKILL)
    fleet.restore()
    with Client(address) as client:
        assert client.generate(STORY, max_tokens=2).result().usage.num_completion_tokens == 2


def test_killed_router_loses_nothing_of_the_workers(fleet, services):
    """Which are told by nobody that the client is gone, and stop all the same."""
    workers = ",".join(worker.address for worker in fleet.workers)
    router, address = services.start("router", "router", "--workers", workers)
    before = fleet.num_generated_tokens()
    with Client(address) as client:
        stream = client.generate(STORY, max_tokens=4000, ignore_eos=True)
        next(stream)
        os.kill(router.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            stream.result()
    fleet.wait_until_idle()
    assert fleet.num_generated_tokens() - before < 4000
    port = int(address.rpartition(":")[2])
    services.start("router-again", "router", "--workers", workers, port=port)
    with Client(address) as client:
        assert client.generate(STORY, max_tokens=2).result().usage.num_completion_tokens == 2
