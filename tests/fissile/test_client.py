"""The blocking client against a service that answers by rote."""

import subprocess
import sys

import pytest

from fissile import Client, ClientTls, v1
from fissile.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from fissile.results import (
    FINISH_REASONS,
    Completion,
    Delta,
    Finish,
    Logprob,
    Quantiles,
    Timings,
    Token,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from tests.fakes.certificates import Authority
from tests.fissile.fake_service import FakeService, Silent, Unavailable, serve


def test_reasons_to_finish_are_those_of_the_contract():
    names = {name.removeprefix("FINISH_REASON_").lower() for name, _ in v1.FinishReason.items()}
    assert {*FINISH_REASONS} == names - {"unspecified"} and len(FINISH_REASONS) == len(names) - 1


def test_deltas_join_to_the_text_of_the_result(client):
    stream = client.generate("one two three")
    deltas = list(stream)
    assert deltas[:2] == [Delta(0, "one", token_ids=(0,)), Delta(0, " two", token_ids=(1,))]
    assert deltas[-1] == Delta(0, "", finish=Finish("stop_string", stop="."))
    assert "".join(delta.text for delta in deltas) == stream.result().text == "one two three"


def test_result_carries_usage_and_timings(client):
    generation = client.generate("one two", request_id="mine").result()
    assert generation.request_id == "mine"
    assert generation.usage == Usage(num_prompt_tokens=2, num_completion_tokens=2, num_cached_tokens=1)
    assert generation.timings == Timings(ttft=0.25, tpot=None, e2e=1.5)


def test_several_completions_are_kept_apart(client):
    completions = client.generate("a b", n=2).result().completions
    finish = Finish("stop_string", stop=".")
    assert completions == tuple(Completion(i, "a b", finish, token_ids=(0, 1)) for i in range(2))


def test_prompt_of_token_ids(client, service):
    assert client.generate([7, 8]).result().text == "7 8"
    assert service.requests[0].WhichOneof("prompt") == "tokens"


def test_chat(client, service):
    stream = client.chat([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], max_tokens=9)
    assert stream.result().text == "2messages"
    assert stream.result().completions[0].finish == Finish("eos", stop_token_id=2)
    assert service.requests[0].options.max_tokens == 9


def test_several_prompts_are_told_apart(client, service):
    generation = client.generate(["a b", "c"]).result()
    assert [(c.prompt_index, c.index, c.text) for c in generation.completions] == [(0, 0, "a b"), (1, 0, "c")]
    assert generation.usage == Usage(num_prompt_tokens=2)
    assert [prompt.text for prompt in service.requests[0].prompts] == ["a b", "c"]


def test_logprobs(client):
    generation = client.generate("one", logprobs=1, prompt_logprobs=0).result()
    chosen = Logprob(0, -2.0, 3, b"\xff")
    assert generation.completions[0].logprobs == ((chosen, Logprob(90, -1.0, 1, b"l")),)
    assert generation.prompt_logprobs == ((Logprob(9, -2.0, 3, b"\xff"),), (Logprob(8, -2.0, 3, b"\xff"),))


def test_a_cumulative_stream_ends_with_the_whole_not_with_its_sum(client):
    stream = client.generate("one two three", cumulative=True)
    assert [delta.text for delta in stream] == ["one", "one two", "one two three", "one two three"]
    assert stream.result().text == "one two three"


def test_reasoning_and_tool_calls_are_typed_and_joined(client):
    stream = client.chat([{"role": "user", "content": "?"}], tools=[{"name": "f"}])
    deltas = list(stream)
    assert deltas[2].tool_calls == (ToolCallDelta(0, "call_0", "f", '{"x":'),)
    generation = stream.result()
    (completion,) = generation.completions
    assert (completion.text, completion.reasoning) == ("", "let me see")
    assert completion.tool_calls == (ToolCall("call_0", "f", '{"x": 1}'), ToolCall("call_1", "f", "{}"))
    assert generation.usage.num_reasoning_tokens == 4


def test_an_answer_goes_on_as_the_next_message(client, service):
    messages = [{"role": "user", "content": "?"}]
    answer = client.chat(messages, tools=[{"name": "f"}]).result().completions[0]
    results = [{"role": "tool", "content": "3", "tool_call_id": call.id} for call in answer.tool_calls]
    client.chat([*messages, answer.message(), *results]).result()
    _, assistant, *tools = service.requests[1].messages
    assert (assistant.reasoning, assistant.tool_calls[0].arguments) == ("let me see", '{"x": 1}')
    assert [tool.tool_call_id for tool in tools] == ["call_0", "call_1"]


def test_a_typed_error_names_the_field(client):
    with pytest.raises(InvalidArgumentError) as failed:
        client.generate("fail").result()
    assert failed.value.violations[0].field == "options.sampling.top_p"


def test_an_answer_cut_short_is_an_error(client):
    with pytest.raises(InternalError, match="without a finish reason"):
        client.generate("cut").result()


def test_nobody_there_is_unavailable():
    with Client("localhost:1") as client, pytest.raises(UnavailableError):
        client.models(timeout=5)


def test_leaving_the_stream_cancels_the_call(client, service):
    with client.generate("slow") as stream:
        next(stream)
    assert service.cancelled.wait(5)


def test_dropping_the_stream_cancels_the_call(client, service):
    next(client.generate("slow"))
    assert service.cancelled.wait(5)


def test_timeout(client, service):
    with pytest.raises(DeadlineExceededError, match=r"^the deadline passed before the request was finished$"):
        client.generate("slow", timeout=0.1).result()
    assert service.cancelled.wait(5)


def test_a_stream_that_was_closed_says_so(client):
    stream = client.generate("slow")
    next(stream)
    stream.close()
    with pytest.raises(CancelledError, match=r"^the stream was closed$"):
        next(stream)


def test_a_client_that_was_closed_says_so(address):
    client = Client(address)
    stream = client.generate("slow")
    next(stream)
    client.close()
    client.close()
    with pytest.raises(CancelledError, match=r"^the client was closed$"):
        next(stream)
    for call in (client.models, lambda: client.generate("x")):
        with pytest.raises(FailedPreconditionError, match=r"^the client is closed$"):
            call()


@pytest.mark.parametrize(("address", "said"), [(5, "5 is not a list"), (["a", 5], "5 is not a text"), ([], "at least")])
def test_an_address_that_is_none(address, said):
    with pytest.raises(InvalidArgumentError, match=f"^address: {said}"):
        Client(address)


def test_tokenize_and_back(client):
    tokens = client.tokenize("hé")
    assert tokens[1] == Token(0xC3, b"\xc3")
    assert client.detokenize([token.id for token in tokens]) == "hé"


def test_models(client):
    (model,) = client.models()
    assert (model.id, model.max_model_len, model.eos_token_ids) == ("fake", 128, (2,))
    assert model.default_sampling == {
        "temperature": 0.5, "top_k": 20, "bad_token_sequences": ((3, 4),), "logit_bias": {5: -1.0}, "stop": ("###",)
    }  # fmt: skip


def test_stats(client):
    stats = client.stats()
    assert stats.ttft == Quantiles(2, 0.5, 0.5, 0.9, 0.95, 0.99, 1.0)
    assert stats.finished == {"eos": 7}
    assert (stats.workers[0].num_running, stats.workers[0].num_used_blocks, stats.uptime) == (3, 5, 3.0)
    assert (stats.workers[0].num_draft_tokens, stats.workers[0].num_accepted_tokens) == (20, 15)


def test_tls(tmp_path):
    authority = Authority(tmp_path / "ca")
    with serve(FakeService(), authority.server("localhost")) as address:
        with Client(address, tls=authority.client()) as client:
            assert client.generate("hello").result().text == "hello"
        with Client(address) as client, pytest.raises(UnavailableError):
            client.models(timeout=5)


def test_a_certificate_without_its_key_is_refused(tmp_path):
    certificate, key = Authority(tmp_path / "ca").issue()
    for tls in (ClientTls(certificate=certificate), ClientTls(key=key)):
        with pytest.raises(InvalidArgumentError, match="a certificate and its key go together"):
            Client("localhost:1", tls=tls)


def test_importing_the_stubs_loads_no_client():
    code = "import sys, fissile.v1; print('fissile.client' in sys.modules, 'rich' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "False False\n"


def test_a_call_goes_on_to_the_next_router_and_stays_there(address, service):
    with serve(Unavailable()) as draining, Client(["localhost:1", draining, address]) as client:
        for _ in range(2):
            assert client.generate("one two", timeout=30).result().text == "one two"
        assert [model.id for model in client.models()] == ["fake"]
    assert len(service.requests) == 2


def test_unary_calls_go_on_too_and_the_last_error_is_the_answer(address):
    with serve(Unavailable()) as draining:
        with Client(f"{draining}, {address}") as client:
            assert [model.id for model in client.models()] == ["fake"]
        with Client(["localhost:1", draining]) as client, pytest.raises(UnavailableError, match="draining"):
            client.models(timeout=5)


def test_an_answer_that_has_begun_is_not_begun_again(address, service):
    with serve(Unavailable(after_first=True)) as draining, Client([draining, address]) as client:
        stream = client.generate("one two")
        assert next(stream).text == "one"
        with pytest.raises(UnavailableError, match="draining"):
            stream.result()
    assert service.requests == []


def test_other_errors_are_answers(address):
    other = FakeService()
    with serve(other) as second, Client([address, second]) as client, pytest.raises(InvalidArgumentError):
        client.generate("fail").result()
    assert other.requests == []


def test_a_router_that_says_nothing_is_left(address, monkeypatch):
    monkeypatch.setattr("fissile.client.ANSWER_SECONDS", 0.1)
    silent = Silent()
    with serve(silent) as stopped:
        with Client([stopped, address]) as client:
            assert client.generate("one").result().text == "one"
        with Client([stopped]) as client, pytest.raises(DeadlineExceededError):
            client.generate("one", timeout=0.5).result()


def test_the_deadline_is_of_all_routers_together(monkeypatch):
    monkeypatch.setattr("fissile.client.ANSWER_SECONDS", 0.2)
    with serve(Silent()) as a, serve(Silent()) as b, Client([a, b]) as client, pytest.raises(DeadlineExceededError):
        client.generate("one", timeout=0.5).result()


def test_no_router_is_no_address():
    with pytest.raises(InvalidArgumentError, match="at least one router"):
        Client([])
