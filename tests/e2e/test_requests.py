"""What a client sees of real services: streaming, many at once, every way to end."""

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from fissile import Client
from fissile.channel import channel
from fissile.cli.processes import Child
from fissile.errors import DeadlineExceededError
from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    GenerateRequest,
    GenerationOptions,
    GenerationServiceStub,
    SamplingParams,
)

STORY = "Once upon a time, in a small village by the sea,"
LONG = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}


def test_text_streams_as_it_is_generated(client):
    deltas = list(client.generate(STORY, max_tokens=24, temperature=0.0, ignore_eos=True))
    assert len([delta for delta in deltas if delta.text]) > 5
    whole = client.generate(STORY, max_tokens=24, temperature=0.0, ignore_eos=True).result()
    assert "".join(delta.text for delta in deltas) == whole.completions[0].text


def test_the_last_message_has_finish_usage_and_timings(client):
    answer = client.generate(STORY, max_tokens=8, temperature=0.0, ignore_eos=True).result()
    assert answer.completions[0].finish.reason == "length"
    assert answer.usage.num_completion_tokens == 8
    assert answer.usage.num_prompt_tokens == len(client.tokenize(STORY))
    assert 0 < answer.timings.ttft <= answer.timings.e2e
    assert answer.timings.tpot > 0


def test_chat_knows_the_capital_of_france(client):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat(question, temperature=0.0, max_tokens=32).result()
    assert "Paris" in answer.completions[0].text
    assert answer.completions[0].finish.reason == "eos"
    assert "<|im_end|>" not in answer.completions[0].text


def test_32_clients_at_once(cluster, idle):
    def one(number: int) -> tuple[int, str]:
        with Client(cluster.router_address) as own:
            answer = own.generate(f"Item number {number} is", max_tokens=16, temperature=0.0, ignore_eos=True).result()
            return answer.usage.num_completion_tokens, answer.completions[0].finish.reason

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(one, range(32))) == [(16, "length")] * 32
    idle()
    with Client(cluster.router_address) as own:
        assert all(worker.num_generated_tokens > 0 for worker in own.stats().workers), "both workers had work"


def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(client):
    def one(seed: int) -> str:
        return client.generate(STORY, max_tokens=16, temperature=1.0, seed=seed).result().completions[0].text

    alone = [one(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(one, [0, 1, 2, 3, 4, 5, 6, 7]))
    assert crowd[:4] == alone
    assert len(set(crowd)) == 8


def test_n_completions_of_one_prompt(client):
    answer = client.generate(STORY, n=3, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True).result()
    assert len({completion.text for completion in answer.completions}) == 3
    assert answer.usage.num_prompt_tokens == len(client.tokenize(STORY))
    assert answer.usage.num_completion_tokens == 36
    first = client.generate(STORY, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True).result()
    assert answer.completions[0].text == first.completions[0].text


def test_beam_search_gives_its_hypotheses_in_order(cluster):
    from fissile.v1 import BeamSearch

    options = GenerationOptions(
        max_tokens=8, n=2, sampling=SamplingParams(beam_search=BeamSearch(width=3)), ignore_eos=True
    )
    with channel(cluster.router_address) as connection:
        call = GenerationServiceStub(connection).Generate(GenerateRequest(text=STORY, options=options))
        finished = {delta.index: delta for message in call for delta in message.completions if delta.HasField("finish")}
    assert sorted(finished) == [0, 1]
    assert finished[0].finish.score >= finished[1].finish.score


def test_stop_string_ends_the_worker_too(client, idle):
    whole = client.generate(STORY, max_tokens=40, temperature=0.0, ignore_eos=True).result().completions[0].text
    stop = whole[20:26]
    answer = client.generate(STORY, stop=stop, **LONG).result()
    assert answer.completions[0].text == whole[: whole.index(stop)]
    assert answer.completions[0].finish.reason == "stop_string"
    assert answer.completions[0].finish.stop == stop
    assert answer.usage.num_completion_tokens < 40
    idle()


def test_cancel_frees_the_worker(client, idle):
    stream = client.generate(STORY, **LONG)
    for _ in range(3):
        next(stream)
    stream.close()
    idle()


def test_deadline_reaches_the_client_and_the_worker(client, idle):
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.generate(STORY, timeout=1.0, **LONG).result()
    assert time.monotonic() - begin < 10
    idle()


def test_slow_reader_gets_every_token(cluster, idle):
    request = GenerateRequest(
        text=STORY,
        options=GenerationOptions(max_tokens=40, ignore_eos=True, sampling=SamplingParams(temperature=0.0)),
    )
    with channel(cluster.router_address) as connection:
        text = ""
        for message in GenerationServiceStub(connection).Generate(request):
            time.sleep(0.2)  # slower than the worker
            text += "".join(delta.text for delta in message.completions)
    with Client(cluster.router_address) as quick:
        whole = quick.generate(STORY, max_tokens=40, temperature=0.0, ignore_eos=True).result()
    assert text == whole.completions[0].text
    idle()


def test_repeated_prompt_is_found_in_the_cache(services):
    _, worker = services.start(
        "worker", "worker", "--max-model-len", "2048", "--num-threads", "1", "--num-blocks", "64"
    )
    _, address = services.start("router", "router", "--workers", worker)
    with Client(address) as own:
        prompt = list(range(1000, 1100))
        cached = [
            own.generate(prompt, max_tokens=2, temperature=0.0).result().usage.num_cached_tokens for _ in range(2)
        ]
        stopped = own.generate(prompt, stop=["e", "a", "i", "o"], max_tokens=40).result()
    assert cached == [0, 96]
    assert stopped.completions[0].finish.reason == "stop_string"
    assert stopped.usage.num_cached_tokens == 96


def metrics_page(service: Child) -> str:
    """What a service started with `--metrics-port 0` serves at the address that its log names."""
    (url,) = re.findall(r"http://\S+/metrics", "\n".join(service.last_lines))
    with urllib.request.urlopen(url) as page:
        return page.read().decode()


def test_metrics_of_both_services(services):
    small = ("--max-model-len", "512", "--num-threads", "1", "--num-blocks", "64", "--metrics-port", "0")
    worker, worker_address = services.start("worker", "worker", *small)
    router, address = services.start("router", "router", "--workers", worker_address, "--metrics-port", "0")
    with Client(address) as own:
        own.generate(STORY, max_tokens=4).result()
    pages = [metrics_page(router), metrics_page(worker)]
    for name in ("ttft", "tpot", "itl", "e2e"):
        assert re.search(rf"^fissile_router_{name}_seconds_count{{.*}} [1-9]", pages[0], re.MULTILINE), name
    assert 'fissile_worker_sequences_total{end="length",model="smollm2"} 1.0' in pages[1]


def test_reflection_describes_a_request(cluster):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with channel(cluster.router_address) as connection:
        stub = reflection_pb2_grpc.ServerReflectionStub(connection)
        symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="fissile.v1.GenerateRequest")
        (response,) = stub.ServerReflectionInfo(iter([symbol]))
    assert response.file_descriptor_response.file_descriptor_proto


def test_chat_streams_raw(cluster):
    request = ChatRequest(messages=[ChatMessage(role=2, content="Hello")], options=GenerationOptions(max_tokens=4))
    with channel(cluster.router_address) as connection:
        *_, last = GenerationServiceStub(connection).Chat(request)
    assert last.usage.num_completion_tokens <= 4
