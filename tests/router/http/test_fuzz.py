"""Any bytes at all, over HTTP: an answer or an error that says what is wrong, and the next one is served."""

import asyncio
import json
import re

from hypothesis import given
from hypothesis import strategies as st

from router.http.bodies import CompletionBody
from router.http.chat_body import ChatBody
from tests import fuzzing
from tests.fakes.system import until
from tests.fakes.worker import FakeWorker, says
from tests.router.http.front import run_front
from tests.router.http.test_bodies import CHAT, COMPLETION, json_values

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/toy", "/health", "/v1/completions/"]
WILD_PATHS = ["/", "*", "//", "/v1/models/%ff%00", "/v1/models/" + "x" * 5000, "http://[/v1/models", "/v1/x?a=%&[]"]
HEADERS = [
    b"host: [",
    b"host: a b\xff",
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: 99999999999999999999999",
    b"content-length: 0x10",
    b"content-length: 12, 12",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"expect: 100-continue",
    b"connection: upgrade\r\nupgrade: websocket",
    b"upgrade: h2c",
    b"connection: close",
    b"authorization: Bearer \xff",
    b"traceparent: 00-" + b"f" * 500,
    b"content-type: text/plain; charset=utf-16",
    b"content-encoding: gzip",
    b"origin: null",
    b"a: \0",
    b": empty",
    b"no colon",
    b"folded: a\r\n b",
    b"x-large: " + b"y" * 60_000,
    b"\r\n".join(b"x-%d: y" % i for i in range(1500)),
]
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@st.composite
def bodies(draw):
    cls, base = draw(st.sampled_from([(CompletionBody, COMPLETION), (ChatBody, CHAT)]))
    fields = draw(st.dictionaries(st.sampled_from(sorted(cls.model_fields)), json_values, max_size=3))
    return json.dumps({**base, **fields}).encode()


BODIES = st.one_of(
    bodies(),
    st.binary(max_size=100),
    st.sampled_from(
        [b"", b"[" * 5000, b'{"a":' * 500, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"\xef\xbb\xbf{}"]
    ),
    st.sampled_from([b'{"prompt": "%s"}' % (b"x" * 300_000), b'{"model": "%s", "prompt": "x"}' % (b"x" * 100_000)]),
)


@st.composite
def http_requests(draw):
    """Nearly HTTP, most of them."""
    method = draw(st.sampled_from([b"POST", b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"CONNECT", b"G\xff"]))
    path = draw(st.sampled_from(PATHS + WILD_PATHS)).encode()
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b""]))
    body = draw(BODIES)
    framing = draw(st.sampled_from(["length", "length", "chunks", "none"]))
    headers = [b"host: x", *draw(st.lists(st.sampled_from(HEADERS), max_size=2))]
    if framing == "length":
        headers.append(b"content-length: %d" % (len(body) + draw(st.sampled_from([0, 0, 0, -1, 1, 10]))))
    elif framing == "chunks":
        headers.append(b"transfer-encoding: chunked")
        size = draw(st.integers(1, max(1, len(body))))
        parts = [body[i : i + size] for i in range(0, len(body), max(size, len(body) // 50 + 1))]
        sizes = [
            draw(st.sampled_from([b"%x" % len(part)] * 8 + [b"", b"-1", b"f" * 17, b"%x;x=y" % len(part)]))
            for part in parts
        ]
        body = b"".join(b"%s\r\n%s\r\n" % pair for pair in zip(sizes, parts, strict=True)) + b"0\r\n\r\n"
    return b" ".join([method, path, version]) + b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body


SENT = st.one_of(st.lists(http_requests(), min_size=1, max_size=3).map(b"".join), st.binary(min_size=1, max_size=300))


async def answers(port, raw):
    """Statuses of what comes until the other side hangs up, which it must; what is refused is JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(raw + LAST)
        async with asyncio.timeout(20):
            while part := await reader.read(65536):
                received += part
    except ConnectionError:  # it may hang up before all is sent
        pass
    finally:
        writer.close()
    heads = re.findall(rb"^HTTP/1\.1 (\d+) [^\r]*\r\n(.*?)\r\n\r\n", received, re.MULTILINE | re.DOTALL)
    for status, head in heads:
        assert status[:1] != b"4" or b"application/json" in head, received
    return [int(status) for status, _ in heads]


@fuzzing.examples(6)
@given(batch=st.lists(SENT, min_size=25, max_size=25))
def test_a_front_answers_or_says_what_is_wrong_and_stays_whole(batch):
    async def scenario(client, system):
        with fuzzing.no_fault_logged():
            port = system.router.http_port
            for raw, statuses in zip(batch, await asyncio.gather(*(answers(port, raw) for raw in batch)), strict=True):
                assert all(status < 500 for status in statuses), (statuses, raw[:2000])
            good = await client.post("/v1/completions", json={"prompt": "a"})
            assert good.json()["choices"][0]["text"] == "ok"
            await system.quiet()
            admission = system.router.parts.admission
            await until(lambda: admission.connections.num_taken <= 1 and not admission.held_bytes.num_taken)

    run_front(scenario, FakeWorker(says("ok"), max_model_len=64), receive_timeout=0.3)
