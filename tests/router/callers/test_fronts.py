"""Keys of a file on both fronts: who is let in, what for, and what the worker gets."""

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2, status_pb2

from fissile.errors import (
    STATUS_DETAILS_KEY,
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
)
from fissile.v1 import (
    GenerateRequest,
    GenerationOptions,
    GetModelRequest,
    GetStatsRequest,
    ListModelsRequest,
    TokenizeRequest,
)
from router.callers.caller import Caller
from tests.fakes.system import collect, error_of, run_system
from tests.fakes.worker import FakeWorker, counts, says

FREE, BOUND = "free-free-free-free", "bound-bound-bound-bound"
KEYS = f"""
[[keys]]
name = "free"
secret = "{FREE}"
tenant = ""

[[keys]]
name = "bound"
secret = "{BOUND}"
tenant = "acme"
requests_per_minute = 2
min_priority = 0
models = ["toy"]
"""


def shown(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def run(tmp_path):
    """Over a worker of the model "toy" and one of the model "big"."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)

    def run_with_keys(scenario):
        toy, big = FakeWorker(says(" Paris")), FakeWorker(says("x"), model="big", aliases=["large"])
        return run_system(scenario, toy, big, api_key_file=path, http_port=0)

    return run_with_keys


async def generate(system, key: str, model: str = "toy", **options) -> str:
    request = GenerateRequest(text="a", model=model, options=GenerationOptions(**options))
    return (await collect(system.stub.Generate(request, metadata=shown(key)))).text


def test_a_caller_sees_and_uses_the_models_of_its_key(run):
    async def scenario(system):
        stub = system.stub
        listed = [
            [model.id for model in (await stub.ListModels(ListModelsRequest(), metadata=shown(key))).models]
            for key in (FREE, BOUND)
        ]
        only = (await stub.GetModel(GetModelRequest(), metadata=shown(BOUND))).model.id
        calls = [
            generate(system, BOUND, "large"),
            stub.GetModel(GetModelRequest(model="big"), metadata=shown(BOUND)),
            stub.Tokenize(TokenizeRequest(model="big", text="a"), metadata=shown(BOUND)),
        ]
        errors = [await error_of(call) for call in calls]
        stats = await error_of(stub.GetStats(GetStatsRequest(), metadata=shown(BOUND)))
        return listed, only, errors, stats, await generate(system, FREE, "large")

    listed, only, errors, stats, answer = run(scenario)
    assert (listed, only, answer) == ([["big", "toy"], ["toy"]], "toy", "x")
    for error in errors:
        assert isinstance(error, NotFoundError)
        assert error.message.endswith("is not served here; there is toy"), "others are not spoken of"
    assert isinstance(stats, PermissionDeniedError)


def test_a_priority_above_that_of_the_key_is_refused_by_its_field(run):
    async def scenario(system):
        return [await error_of(generate(system, BOUND, priority=-1)), await generate(system, FREE, priority=-1)]

    error, answer = run(scenario)
    assert isinstance(error, PermissionDeniedError) and error.violations[0].field == "options.priority"
    assert answer == " Paris"


def test_a_used_up_quota_says_whose_and_when_to_come_again(run):
    async def scenario(system):
        answers = [await generate(system, BOUND) for _ in range(2)]
        try:
            await generate(system, BOUND)
        except grpc.aio.AioRpcError as error:
            details = next(value for key, value in error.trailing_metadata() if key == STATUS_DETAILS_KEY)
        return answers, details, await error_of(generate(system, BOUND)), await generate(system, FREE)

    answers, details, error, free = run(scenario)
    assert answers == [" Paris", " Paris"] and free == " Paris"
    assert isinstance(error, QuotaExceededError)
    assert (error.subject, error.limit) == ("key:bound", "requests_per_minute is 2")
    assert 0 < error.retry_after <= 30
    failure = error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(failure) for detail in status_pb2.Status.FromString(details).details)
    assert failure.violations[0].subject == "key:bound"


def test_the_salt_is_the_tenants(run):
    async def scenario(system):
        for key in (FREE, BOUND):
            for salt in (b"", b"s"):
                await generate(system, key, cache_salt=salt)
        return [group.cache_salt for group in system.workers[0].groups]

    nobody, acme = Caller("free"), Caller("bound", "acme")
    salts = [b"", nobody.cache_salt(b"s"), acme.cache_salt(b""), acme.cache_salt(b"s")]
    assert run(scenario) == salts


def test_http_asks_for_the_same_keys(run):
    body = {"model": "toy", "prompt": "a"}
    tries = [
        (None, body, 401),
        ("other-other-other-other", body, 401),
        (FREE, body, 200),
        (BOUND, body, 200),
        (BOUND, {**body, "priority": -1}, 403),
        (BOUND, {**body, "model": "big"}, 429),
        (FREE, {**body, "model": "big"}, 200),
    ]

    async def scenario(system):
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{system.router.http_port}") as client:
            answers = []
            for key, json, _ in tries:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                answers.append(await client.post("/v1/completions", json=json, headers=headers))
            models = await client.get("/v1/models", headers={"authorization": f"Bearer {BOUND}"})
            missing = await client.get("/v1/models/big", headers={"authorization": f"Bearer {BOUND}"})
            health = await client.get("/health")
        return answers, models.json(), missing.status_code, health.status_code

    answers, models, missing, health = run(scenario)
    assert [answer.status_code for answer in answers] == [status for _, _, status in tries]
    assert 20 < int(answers[5].headers["retry-after"]) <= 30
    assert answers[4].json()["error"]["param"] == "priority"
    assert [model["id"] for model in models["data"]] == ["toy"]
    assert (missing, health) == (404, 200)


def test_a_key_taken_away_is_unauthenticated(run, tmp_path, monkeypatch):
    monkeypatch.setattr("router.callers.callers.RELOAD_SECONDS", 0.01)

    async def is_known(system, key: str) -> bool:
        try:
            await system.stub.ListModels(ListModelsRequest(), metadata=shown(key))
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            return False
        return True

    async def scenario(system):
        (tmp_path / "keys.toml").write_text(KEYS.replace(BOUND, BOUND + "-2"))
        while await is_known(system, BOUND):
            pass
        return [await is_known(system, key) for key in (BOUND + "-2", FREE)]

    assert run(scenario) == [True, True]


def test_ids_of_requests_are_a_callers_own(tmp_path):
    """Nobody learns what others have open, nor takes their ids."""
    (tmp_path / "keys.toml").write_text(KEYS)

    async def scenario(system):
        request = GenerateRequest(text="a", request_id="same")
        calls = [system.stub.Generate(request, metadata=shown(key)) for key in (FREE, BOUND)]
        ids = [(await call.read()).request_id for call in calls]
        return ids, await error_of(system.stub.Generate(request, metadata=shown(FREE)).read())

    worker = FakeWorker(counts(9), mute_after=1)
    ids, error = run_system(scenario, worker, api_key_file=tmp_path / "keys.toml", drain_timeout=0)
    assert ids == ["same", "same"]
    assert isinstance(error, AlreadyExistsError)
