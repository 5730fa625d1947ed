"""What a browser may do: pages of the origins that are allowed, and no others."""

import pytest

from router.config import RouterSettings
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import get, run_front

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def options(path="/v1/chat/completions", headers=PREFLIGHT, **settings):
    async def scenario(client, system):
        return await client.options(path, headers=headers)

    return run_front(scenario, FakeWorker(says("b")), **settings)


@pytest.mark.parametrize("allowed", [[PAGE], ["https://other.example", PAGE], ["*"]])
def test_a_browser_may_ask_from_an_allowed_page_and_shows_no_key_when_it_asks_whether(allowed):
    answer = options(http_allowed_origins=allowed, api_key="secret")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]


def test_a_page_reads_answers_and_errors_alike():
    """Without the header a browser hides even the error from its page."""

    async def scenario(client, system):
        asked = [
            await client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE, **key})
            for key in ({"authorization": "Bearer secret"}, {})
        ]
        return [(answer.status_code, answer.headers.get("access-control-allow-origin")) for answer in asked]

    settings = {"http_allowed_origins": [PAGE], "api_key": "secret"}
    assert run_front(scenario, FakeWorker(says("b")), **settings) == [(200, PAGE), (401, PAGE)]


def test_other_pages_and_a_front_without_the_setting_allow_nothing():
    assert "access-control-allow-origin" not in options(http_allowed_origins=["https://other.example"]).headers
    assert options().status_code == 405
    assert "access-control-allow-origin" not in get("/v1/models", headers={"origin": PAGE}).headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b", "ftp://a"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin):
    with pytest.raises(ValueError, match=r"must be http\(s\)://host\[:port\] or \*"):
        RouterSettings(http_allowed_origins=[origin])
