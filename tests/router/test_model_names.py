"""What requests may call a model, and a chat template that the router was told."""

import asyncio
import re

import grpc
import pytest
from prometheus_client import generate_latest

from fissile import InvalidArgumentError, NotFoundError
from fissile.errors import from_rpc_error
from fissile.v1 import ChatMessage, ChatRequest, ChatRole, GenerateRequest, GetModelRequest, ListModelsRequest
from router.config import RouterSettings
from router.server import RouterServer
from tests.fakes import tokenizer as toys
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import run_front


def test_workers_of_one_name_are_one_model_and_none_need_be_named():
    """Whatever paths their copies lie at: a worker's name is not its path."""
    workers = [FakeWorker(says("x"), model="llama") for _ in range(2)]

    async def scenario(system):
        await system.ask(GenerateRequest(text="a"))
        return (await system.stub.ListModels(ListModelsRequest())).models

    assert [(m.id, m.num_workers) for m in run_system(scenario, *workers)] == [("llama", 2)]


def test_a_model_answers_to_its_aliases():
    """Those of all its workers: while they are restarted with another alias, some have it and some do not."""
    workers = [FakeWorker(says("x"), model="llama", aliases=aliases) for aliases in (["prod"], ["prod", "gpt-4o"])]

    async def scenario(system):
        for name in ("llama", "prod", "gpt-4o"):
            await system.ask(GenerateRequest(model=name, text="a"))
        error = await error_of(system.ask(GenerateRequest(model="other", text="a")))
        model = (await system.stub.GetModel(GetModelRequest(model="gpt-4o"))).model
        return model.id, list(model.aliases), model.num_workers, error

    *model, error = run_system(scenario, *workers)
    assert model == ["llama", ["gpt-4o", "prod"], 2]
    assert sum(len(worker.received) for worker in workers) == 3
    assert isinstance(error, NotFoundError) and error.message == "model 'other' is not served here; there is llama"


def test_an_id_goes_before_an_alias_and_of_several_with_one_alias_the_first_has_it():
    workers = [
        FakeWorker(says("x"), model="a", aliases=["b", "prod"]),
        FakeWorker(says("x"), model="b"),
        FakeWorker(says("x"), model="c", aliases=["prod"]),
    ]

    async def scenario(system):
        names = ("b", "prod")
        return [(await system.stub.GetModel(GetModelRequest(model=name))).model.id for name in names]

    assert run_system(scenario, *workers) == ["b", "a"]


def test_a_routers_own_aliases_go_before_those_of_workers_and_never_before_an_id():
    workers = [FakeWorker(says("x"), model="a", aliases=["prod", "beta"]), FakeWorker(says("x"), model="b")]

    async def scenario(system):
        names = ("prod", "a", "beta")
        ids = [(await system.stub.GetModel(GetModelRequest(model=name))).model.id for name in names]
        error = await error_of(system.stub.GetModel(GetModelRequest(model="lost")))
        listed = (await system.stub.ListModels(ListModelsRequest())).models
        return ids, [(model.id, list(model.aliases)) for model in listed], error

    ids, listed, error = run_system(scenario, *workers, model_aliases=["prod=b", "a=b", "lost=c"])
    assert ids == ["b", "a", "a"]
    assert listed == [("a", ["beta"]), ("b", ["prod"])]
    assert isinstance(error, NotFoundError) and error.message == "model 'lost' is not served here; there is a, b"


def test_a_model_whose_worker_is_still_connected_to_is_waited_for():
    """Another one is there already; a name that nobody has is refused once all workers have been tried."""
    quick, slow = FakeWorker(says("x"), model="a"), FakeWorker(says("x"), model="b")
    gate = asyncio.Event()
    describe = slow.GetWorker

    async def late(request, context):
        await gate.wait()
        return await describe(request, context)

    slow.GetWorker = late

    async def scenario(system):
        await until(lambda: system.router.parts.workers.catalogue.models)
        asked = [asyncio.create_task(error_or_model(system, name)) for name in ("b", "c")]
        await asyncio.sleep(0.05)
        first = await error_or_model(system, "a")
        assert not any(task.done() for task in asked)
        gate.set()
        return [first, *[await task for task in asked]]

    *found, error = run_system(scenario, quick, slow, wait_ready=False, worker_wait=20.0)
    assert found == ["a", "b"]
    assert error == "model 'c' is not served here; there is a, b"


async def error_or_model(system, name):
    try:
        return (await system.stub.GetModel(GetModelRequest(model=name))).model.id
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).message


def test_http_lists_every_name():
    async def scenario(client, system):
        listed = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/prod")).json()
        answer = (await client.post("/v1/completions", json={"model": "prod", "prompt": "a"})).json()
        return [(entry["id"], entry["root"]) for entry in listed], one["root"], answer["model"]

    listed, root, model = run_front(scenario, FakeWorker(says("x"), model="owner/llama", aliases=["prod"]))
    assert listed == [("owner/llama", "owner/llama"), ("prod", "owner/llama")]
    assert (root, model) == ("owner/llama", "prod")


def test_a_template_of_the_routers_goes_before_those_of_its_models(tmp_path):
    path = tmp_path / "shout.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    worker = FakeWorker(says("x"))
    message = ChatMessage(role=ChatRole.CHAT_ROLE_USER, content="hello")

    async def scenario(system):
        await collect(system.stub.Chat(ChatRequest(messages=[message])))
        return toys.byte_level().decode(worker.received[0].token_ids, skip_special_tokens=False)

    assert run_system(scenario, worker, chat_template=path) == f"{toys.BOS}HELLO"


def test_a_bad_template_is_refused_at_start_with_its_line(tmp_path):
    path = tmp_path / "bad.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(InvalidArgumentError, match=f"chat-template {path}, line 2: unexpected '}}'"):
        RouterServer(RouterSettings(chat_template=path))


def test_what_is_asked_for_in_vain_makes_no_labels():
    """Or a client could fill the memory of the router and of Prometheus."""

    async def scenario(system):
        for number in range(20):
            await error_of(system.ask(GenerateRequest(model=f"m{number}", text="a")))
        await system.ask(GenerateRequest(model="toy", text="a"))
        return generate_latest(system.router.parts.metrics.registry).decode()

    told = run_system(scenario, FakeWorker(says("x")))
    assert set(re.findall(r'model="([^"]*)"', told)) == {"", "toy"}
    assert 'fissile_router_requests_total{end="not_found",model="",worker=""} 20.0' in told
