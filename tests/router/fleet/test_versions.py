"""Workers of one model that differ: who gets a request, what counts for it, and where it may go on."""

import asyncio
import logging
from collections import Counter
from random import Random

import pytest

from fissile import InvalidArgumentError, UnavailableError
from fissile.v1 import (
    ChatMessage,
    ChatRequest,
    ChatRole,
    GenerateRequest,
    GenerationOptions,
    GetModelRequest,
    GetWorkerResponse,
    SamplingParams,
    TokenSequence,
    WorkerLoad,
)
from router.admission.ration import Ration
from router.admission.worker_queue import Waiting, WorkerQueue
from router.asking.spec import Prompt, RequestSpec, TextRules
from router.config import RouterSettings
from router.fleet.health.breaker import Breaker
from router.fleet.versions import VersionChoice, Wish, line_of
from router.model.served import ServedModel, ServedVersion, Version
from tests.fakes import tokenizer as toys
from tests.fakes.system import collect, error_of, run_system, until
from tests.fakes.worker import FakeWorker, counts, says


def slow(**about):
    return FakeWorker(counts(40), step_seconds=0.01, **about)


def of_tokens(num_tokens, max_tokens=None):
    prompt = TokenSequence(token_ids=[5] * num_tokens)
    return GenerateRequest(tokens=prompt, options=GenerationOptions(max_tokens=max_tokens))


# Choosing


class Fleet:
    """As VersionChoice sees it: workers by version, with what each has to do."""

    def __init__(self, **loads):
        """By name of the version: sequences on each of its workers, None where all fail."""
        self.infos = {name: GetWorkerResponse(model="m", model_version=name, max_model_len=100) for name in loads}
        self.loads = loads

    @property
    def model(self):
        served = [
            ServedVersion("m", Version.of(info), info, None, len(self.loads[name])) for name, info in self.infos.items()
        ]
        return ServedModel("m", tuple(served))

    @property
    def catalogue(self):
        return self

    @property
    def available(self):
        return {
            "m": {
                Version.of(info): [_Link(f"{name}:{i}", n) for i, n in enumerate(self.loads[name])]
                for name, info in self.infos.items()
            }
        }


class _Link:
    def __init__(self, address, num_sequences):
        self.address = address
        self.load = self
        self.num_sequences = num_sequences or 0
        self.breaker = Breaker("a")
        for _ in range(5 if num_sequences is None else 0):
            self.breaker.attempt().failed()


def chosen(fleet, times, shares=None, seed=7, keys=("",), queue=None):
    choice = VersionChoice(fleet, {"m": shares} if shares else {}, queue or WorkerQueue(100, Ration()), Random(seed))
    wishes = [Wish(routing_key=key) for key in keys] * times
    return Counter(choice.in_order(fleet.model, wish)[0].version.name for wish in wishes)


def test_the_version_whose_workers_have_least_to_do_is_chosen():
    assert chosen(Fleet(a=[5, 0, 1], b=[3]), 10) == {"a": 10}
    assert chosen(Fleet(a=[5, 2, 3], b=[3]), 10) == {"b": 10}


def test_a_version_whose_workers_fail_at_once_looks_idle_and_gets_nothing():
    assert chosen(Fleet(a=[5], b=[None, None]), 10) == {"a": 10}
    assert chosen(Fleet(a=[5], b=[None]), 10, {"b": 1}) == {"a": 10}
    assert chosen(Fleet(a=[None], b=[None]), 10).total() == 10


def test_equals_are_drawn_by_their_number_of_workers():
    assert chosen(Fleet(a=[0, 0, 0], b=[0]), 4000) == {"a": 2989, "b": 1011}


def test_requests_that_wait_for_room_are_load_too():
    fleet = Fleet(small=[8], large=[16])
    (small,) = [one.version for one in fleet.model.versions if one.version.name == "small"]

    async def scenario():
        queue = WorkerQueue(100, Ration())
        for number in range(9):
            waiting = Waiting(lambda: False, lambda: None, lambda error: None, 0.5)
            queue.enter(line_of("m", small, None), f"c{number}", waiting, cost=1, priority=0, time_left=None)
        return chosen(fleet, 10, queue=queue)

    assert chosen(fleet, 10) == {"small": 10}
    assert asyncio.run(scenario()) == {"large": 10}


def test_a_share_is_kept_whatever_the_load_and_the_others_share_the_rest_by_load():
    fleet = Fleet(old=[9], other=[8], canary=[0])
    assert chosen(fleet, 4000, {"canary": 0.05}) == {"other": 3790, "canary": 210}
    assert chosen(fleet, 100, {"canary": 0}) == {"other": 100}


def test_requests_with_one_key_stay_together_as_long_as_their_workers_load_allows():
    keys = [f"user-{i}" for i in range(400)]
    once = chosen(Fleet(a=[0, 0, 0], b=[0]), 1, keys=keys)
    assert once == {"a": 301, "b": 99}
    assert chosen(Fleet(a=[2, 0, 3], b=[1]), 1, keys=keys, seed=8) == once
    assert chosen(Fleet(a=[0, 0, 0], b=[20]), 1, keys=keys) == {"a": 400}
    for key in keys[:20]:
        assert len(chosen(Fleet(a=[9], canary=[0]), 5, {"canary": 0.3}, keys=[key])) == 1
    assert chosen(Fleet(a=[9], canary=[0]), 1, {"canary": 0.3}, keys=keys)["canary"] == 113


def test_shares_give_way_where_no_other_version_is_there():
    assert chosen(Fleet(canary=[0]), 10, {"canary": 0}) == {"canary": 10}
    assert chosen(Fleet(a=[0], b=[0]), 10, {"a": 0, "b": 0}).total() == 10
    assert chosen(Fleet(a=[0]), 10, {"gone": 1}) == {"a": 10}


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("version_shares", "m@v2=5%", "'m@v2=5%' must be MODEL@VERSION=SHARE, the share from 0 to 1"),
        ("version_shares", "v2=0.5", "'v2=0.5' must be MODEL@VERSION=SHARE"),
        ("version_shares", "m@a=0.7,m@b=0.4", "those of m are more than 1 together"),
        ("model_aliases", "gpt", "'gpt' must be NAME=MODEL"),
        ("model_aliases", "=m", "'=m' must be NAME=MODEL"),
    ],
)
def test_bad_settings_are_named(setting, value, said):
    with pytest.raises(ValueError, match=said):
        RouterSettings(**{setting: value})


def test_settings_are_read():
    settings = RouterSettings(version_shares="o/m@v2=0.25,o/m@v3=.1", model_aliases="a=o/m,b=n")
    assert settings.shares() == {"o/m": {"v2": 0.25, "v3": 0.1}}
    assert settings.aliases() == {"a": "o/m", "b": "n"}


# What a chosen version means for a request


def test_requests_at_once_are_spread_over_versions_by_their_workers(caplog):
    workers = [slow(max_model_len=n) for n in (512, 1024, 1024)]

    async def scenario(system):
        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*(system.ask(GenerateRequest(text="hello")) for _ in range(60)))

    run_system(scenario, *workers, tokenizer_threads=1)
    assert all(18 <= len(worker.received) <= 22 for worker in workers)
    (line,) = [r.message for r in caplog.records if "differ" in r.message]
    told = [part.partition(": ")[::2] for part in line.removeprefix("workers of toy differ: ").split("; ")]
    by_context = {what: set(addresses.split(", ")) for addresses, what in told}
    assert by_context["context 512"] == {workers[0].address}
    assert by_context["context 1024"] <= {worker.address for worker in workers[1:]}  # that had come by then


def test_what_only_the_longer_context_has_room_for_goes_there_and_the_largest_limit_is_named():
    small, large = FakeWorker(counts(3), max_model_len=64), FakeWorker(counts(3), max_model_len=128)

    async def scenario(system):
        for _ in range(8):
            await system.ask(of_tokens(100))
            await system.ask(of_tokens(60, 10))
        await system.ask(of_tokens(60, 1000))
        errors = [
            await error_of(system.ask(of_tokens(128))),
            await error_of(system.ask(GenerateRequest(text="x " * 200))),
        ]
        return errors, (await system.stub.GetModel(GetModelRequest())).model

    errors, model = run_system(scenario, small, large)
    assert (len(small.received), len(large.received)) == (0, 17)
    assert all(isinstance(error, InvalidArgumentError) for error in errors)
    assert all("128" in error.message for error in errors)
    assert model.max_model_len == 128
    assert [(v.max_model_len, v.num_workers) for v in model.versions] == [(128, 1), (64, 1)]


def test_what_only_a_version_that_is_away_has_room_for_waits_for_it():
    small, large = FakeWorker(counts(3), max_model_len=64), FakeWorker(counts(3), max_model_len=128)

    async def scenario(system):
        await large.service.set_serving(False)
        link = system.router.parts.workers.links[large.address]
        await until(lambda: not link.is_available)
        error = await error_of(system.ask(of_tokens(100)))
        answer = await system.ask(of_tokens(10))
        waiting = asyncio.create_task(system.ask(of_tokens(100)))
        await large.service.set_serving(True)
        return error, answer, await waiting

    error, *answers = run_system(scenario, small, large, worker_wait=0.5)
    assert isinstance(error, UnavailableError)
    assert [answer.usage.num_prompt_tokens for answer in answers] == [10, 100]
    assert (len(small.received), len(large.received)) == (1, 1)


def test_a_prompt_is_made_by_tokenizer_and_template_of_the_version_that_gets_it():
    plain, shouting = toys.files(toys.byte_level()), toys.files(toys.byte_level(vocab_size=300))
    shouting["tokenizer_config.json"] = plain["tokenizer_config.json"].replace(b"m.content", b"m.content|upper")
    workers = [FakeWorker(says("ok"), files=plain, step_seconds=0.05), FakeWorker(says("ok"), files=shouting)]
    message = ChatMessage(role=ChatRole.CHAT_ROLE_USER, content="hello world")

    async def scenario(system):
        await asyncio.gather(*(collect(system.stub.Chat(ChatRequest(messages=[message]))) for _ in range(12)))

    run_system(scenario, *workers)
    tokenizers = toys.byte_level(), toys.byte_level(vocab_size=300)
    texts = [
        {tokenizer.decode(asked.token_ids, skip_special_tokens=True).split("\n")[1] for asked in worker.received}
        for tokenizer, worker in zip(tokenizers, workers, strict=True)
    ]
    assert texts == [{"hello world"}, {"HELLO WORLD"}]


# Going on elsewhere


def spec(version, max_tokens):
    return RequestSpec(
        request_id="r", model="m", version=version, prompt=Prompt("text", [1] * 10), n=1, sampling=SamplingParams(),
        seed=0,
        max_tokens=max_tokens, text=TextRules(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("other", "max_tokens", "before", "after"),
    [
        ({}, 20, True, True),
        ({"model_version": "v2"}, 20, True, True),
        ({"model_fingerprint": "others"}, 20, True, False),
        ({"dtype": "bfloat16"}, 20, True, False),
        ({"tokenizer_fingerprint": "others"}, 20, False, False),
        ({"vocab_size": 7}, 20, False, False),
        ({"max_model_len": 30}, 20, True, True),
        ({"max_model_len": 29}, 20, False, False),
        ({"max_model_len": 99}, None, False, False),
        ({"max_model_len": 99}, 1000, False, False),
        ({}, 1000, True, True),
        ({"max_model_len": 101}, None, True, True),
    ],
)
def test_which_versions_may_take_over_a_request(other, max_tokens, before, after):
    """Before and after it has its first token. Without max_tokens it ends where the context does."""
    about = {"tokenizer_fingerprint": "t", "model_fingerprint": "w", "dtype": "float32", "max_model_len": 100}
    own, others = (Version.of(GetWorkerResponse(**{**about, **more})) for more in ({}, other))
    asked = spec(own, max_tokens)
    assert (asked.may_go_to(others, has_begun=False), asked.may_go_to(others, has_begun=True)) == (before, after)
    assert asked.is_meant_for(others) == (after and others.name == "")


def test_workers_that_differ_in_context_alone_share_what_all_of_them_have_room_for():
    small, large = (slow(max_model_len=length) for length in (512, 1024))

    async def scenario(system):
        versions = system.router.parts.workers.catalogue.models["toy"].versions
        chosen = min(versions, key=lambda one: one.info.max_model_len)
        asked = spec(chosen.version, max_tokens=20)
        return [link.address for link in system.router.parts.workers.candidates("toy", asked.is_meant_for)]

    assert sorted(run_system(scenario, small, large)) == sorted([small.address, large.address])


BUSY = WorkerLoad(num_running=50)
"""So that a request begins elsewhere."""


async def begin_on(first, system, request):
    """Returns the running request."""
    links = system.router.parts.workers.links
    await until(lambda: all(link.load.num_sequences == 50 for a, link in links.items() if a != first.address))
    return asyncio.create_task(system.ask(request))


def test_a_stream_goes_on_with_the_same_weights_and_ends_honestly_where_there_are_none():
    first, other, same = slow(), slow(model_fingerprint="others", others=BUSY), slow(max_model_len=2048, others=BUSY)

    async def scenario(system):
        running = await begin_on(first, system, of_tokens(3, 40))
        await until(lambda: first.num_emitted >= 5)
        await first.kill()
        await until(lambda: same.num_emitted >= 5)
        await same.kill()
        return await error_of(running)

    error = run_system(scenario, first, other, same, worker_wait=0.2)
    assert (len(first.received), len(other.received), len(same.received)) == (1, 0, 1)
    assert len(same.received[0].member.token_ids) >= 5
    assert isinstance(error, UnavailableError) and error.retry_after == 1.0
    said = (
        "no healthy worker for toy that can stand in for the version that it was made for within 0.2 s; the last one: "
    )
    assert error.message.startswith(said)


def test_before_its_first_token_a_request_may_go_to_other_weights():
    first, other = FakeWorker(counts(5), mute_after=0), FakeWorker(counts(5), model_fingerprint="others", others=BUSY)

    async def scenario(system):
        running = await begin_on(first, system, of_tokens(3))
        await until(lambda: first.received)
        await first.kill()
        return await running

    assert run_system(scenario, first, other).usage.num_completion_tokens == 5
    assert len(other.received) == 1
