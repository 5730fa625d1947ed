"""Every typed error survives the trip through a real server and client with its code, fields and retry delay."""

import asyncio

import grpc
import pytest

from common.server import ServiceServer
from fissile.channel import aio_channel
from fissile.errors import (
    MAX_MESSAGE_BYTES,
    MAX_VIOLATIONS,
    AlreadyExistsError,
    FieldViolation,
    FissileError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    from_rpc_error,
)
from fissile.v1 import (
    GenerateRequest,
    GenerateResponse,
    GenerationServiceServicer,
    GenerationServiceStub,
    GetModelRequest,
    add_GenerationServiceServicer_to_server,
)


class Raising(GenerationServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetModel(self, request, context):
        raise self.error

    async def Generate(self, request, context):
        yield GenerateResponse(request_id="one")
        raise self.error


async def call_both(error: Exception) -> list[FissileError]:
    """The error as a unary and as a streaming client see it."""
    service = ServiceServer("fissile.v1.GenerationService")
    service.serve(add_GenerationServiceServicer_to_server, Raising(error))
    port = await service.start("127.0.0.1", 0)
    seen = []
    async with aio_channel(f"127.0.0.1:{port}") as channel:
        stub = GenerationServiceStub(channel)
        try:
            await stub.GetModel(GetModelRequest())
        except grpc.RpcError as raised:
            seen.append(from_rpc_error(raised))
        received = []
        try:
            async for response in stub.Generate(GenerateRequest()):
                received.append(response.request_id)
        except grpc.RpcError as raised:
            seen.append(from_rpc_error(raised))
        assert received == ["one"], "what was sent before the error arrives"
    await service.stop(0)
    return seen


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError(
            "2 fields", violations=[FieldViolation("options.n", "0 < 1"), FieldViolation("text", "empty")]
        ),
        NotFoundError("no model 'x'"),
        AlreadyExistsError("request id 'a' is open"),
        ResourceExhaustedError("queue full", retry_after=1.5),
    ],
)
def test_typed_error_arrives_whole(error):
    for seen in asyncio.run(call_both(error)):
        assert type(seen) is type(error)
        assert (seen.message, seen.violations, seen.retry_after) == (error.message, error.violations, error.retry_after)


@pytest.mark.parametrize("num_violations", [0, 1, 3, 100])
@pytest.mark.parametrize("char", ["a", "≤", "😀"])
def test_an_error_of_any_length_arrives_cut_but_typed(char, num_violations):
    """It may have a client's own words in it, and travels in headers, which gRPC limits."""
    words = char * 100_000
    violations = [FieldViolation(f"{i}{words}", words) for i in range(num_violations)]
    for seen in asyncio.run(call_both(InvalidArgumentError(words, violations=violations, retry_after=1.5))):
        assert type(seen) is InvalidArgumentError
        assert seen.message == char * (MAX_MESSAGE_BYTES // len(char.encode())) + "…"
        assert len(seen.violations) == min(num_violations, MAX_VIOLATIONS)
        assert all(v.field[0] == str(i) for i, v in enumerate(seen.violations))
        assert seen.retry_after == 1.5


def test_unknown_exception_is_internal_and_keeps_its_text_to_itself(caplog):
    for seen in asyncio.run(call_both(KeyError("a secret"))):
        assert type(seen) is InternalError
        assert "secret" not in seen.message
    assert "KeyError" in caplog.text and "secret" not in caplog.text


def test_of_names_the_field_twice():
    error = InvalidArgumentError.of("options.n", "must be at least 1, got 0")
    assert error.message == "options.n: must be at least 1, got 0"
    assert error.violations == (FieldViolation("options.n", "must be at least 1, got 0"),)
