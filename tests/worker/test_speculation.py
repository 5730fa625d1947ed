"""A worker that drafts: the same tokens in fewer messages, and counts of drafts for routers and Prometheus."""

import asyncio
import socket
import urllib.request

from fissile.v1 import GetWorkerRequest
from tests.worker.harness import expected, run_all, run_worker, sequence


def test_drafts_are_counted_for_all_who_ask():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    message = sequence(1, [7] * 5, max_tokens=40)

    async def scenario(system):
        router = await run_all(system, message)
        page = (await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics")).read().decode()
        return router, page.splitlines(), list((await system.stub.GetWorker(GetWorkerRequest())).capabilities)

    router, lines, capabilities = run_worker(scenario, metrics_port=port, speculative="ngram", min_ngram=1)
    assert router.tokens[1] == expected(message, 40)
    (end,) = (output for response in router.messages for output in response.outputs if output.finish_reason)
    load = router.messages[-1].load
    assert 0 < end.num_accepted_tokens < end.num_draft_tokens
    assert (load.num_accepted_tokens, load.num_draft_tokens) == (end.num_accepted_tokens, end.num_draft_tokens)
    # A step has one token and the drafts that were right, and a message one step or more.
    assert len(router.messages) <= 40 - end.num_accepted_tokens
    model = 'model="smollm2"'
    assert f"fissile_worker_draft_tokens_total{{{model}}} {float(end.num_draft_tokens)}" in lines
    assert f"fissile_worker_accepted_tokens_total{{{model}}} {float(end.num_accepted_tokens)}" in lines
    assert f"fissile_worker_row_accepted_tokens_sum{{{model}}} {float(end.num_accepted_tokens)}" in lines
    assert any(line.startswith('fissile_worker_row_accepted_tokens_bucket{le="4.0"') for line in lines) is False
    assert "speculation" in capabilities


def test_without_it_none_are():
    async def scenario(system):
        router = await run_all(system, sequence(1))
        return router, list((await system.stub.GetWorker(GetWorkerRequest())).capabilities)

    router, capabilities = run_worker(scenario)
    assert not any(response.load.num_draft_tokens for response in router.messages)
    assert "speculation" not in capabilities
