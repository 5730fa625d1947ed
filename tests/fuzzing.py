"""Requests that nobody in their right mind sends, for hypothesis: any bytes, any message of a type, and large or deep
ones; and what must become of them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import settings
from hypothesis import strategies as st

from tests.fakes.deep import delimited
from tests.soak import is_long

LONGER = 60
"""How many times as much the long version tries."""

REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
}
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.one_of(st.integers(0, 500), st.integers(0, 2**32 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1)),
    FieldDescriptor.CPPTYPE_FLOAT: st.one_of(st.floats(-3, 3, width=32), st.floats(width=32)),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.sampled_from(
        ["{}", "[" * 3000, '{"a": "\\ud800"}', "1e999", "<|im_end|>", " ", "\0", "NaN", "x" * 70_000, "€\n" * 4000]
    ),
)
MAX_DEPTH = 6
MANY = st.sampled_from([1, 1000, 50_000])


def examples(num: int) -> settings:
    """So many; more with --soak, which prints what reproduces a failure."""
    return settings(max_examples=num * (LONGER if is_long() else 1), print_blob=True)


def _value_of(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=300)
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _message_of(field.message_type, depth + 1)
    return NUMBERS[field.cpp_type]


def _message_of(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a message by name; recursion ends after some levels."""
    if depth > MAX_DEPTH:
        return st.just({})
    if descriptor.full_name == "google.protobuf.Struct":
        return st.dictionaries(TEXTS, st.one_of(st.floats(), TEXTS, st.none(), st.lists(st.floats(), max_size=2)))
    fields = {
        field.name: st.lists(_value_of(field, depth), max_size=4) if field.is_repeated else _value_of(field, depth)
        for field in descriptor.fields
    }
    oneofs = [[field.name for field in oneof.fields] for oneof in descriptor.oneofs]

    def one_each(values: dict[str, Any]) -> dict[str, Any]:
        for names in oneofs:
            for name in [name for name in names if name in values][1:]:
                del values[name]
        return values

    return st.fixed_dictionaries({}, optional=fields).map(one_each)


def requests(kind: type[Message]) -> st.SearchStrategy[Any]:
    return _message_of(kind.DESCRIPTOR).map(lambda values: kind(**values))


def _nested(descriptor: Descriptor, path: list[int], depth: int) -> bytes:
    """The messages that are the fields of those numbers, over and over, `depth` inside of each other."""
    data = b""
    for level in reversed(range(depth)):
        data = delimited(path[level % len(path)], data)
    return data


@st.composite
def _large(draw: st.DrawFn, kind: type[Message]) -> bytes:
    """One field many times, empty, long or deep."""
    fields = [field for field in kind.DESCRIPTOR.fields if field.number < 16]
    if not fields:
        return b"\x0a\0" * draw(MANY)  # of a field that there is none of
    field = draw(st.sampled_from(fields))
    shape = draw(st.sampled_from(["empty", "long", "deep"]))
    if shape == "empty":
        return delimited(field.number, b"") * draw(MANY)
    if shape == "long":
        return delimited(field.number, draw(st.sampled_from([b"\0", b"x", b"\x01", b"\xff"])) * draw(MANY))
    path = draw(st.lists(st.integers(1, 15), min_size=1, max_size=4))
    return delimited(field.number, _nested(kind.DESCRIPTOR, path, draw(st.sampled_from([90, 110, 1000]))))


@st.composite
def _damaged(draw: st.DrawFn, kind: type[Message]) -> bytes:
    raw = bytearray(draw(requests(kind)).SerializeToString())
    for _ in range(draw(st.integers(1, 3)) if raw else 0):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))]) if draw(st.booleans()) else bytes(raw)


def raw(kind: type[Message]) -> st.SearchStrategy[bytes]:
    """What stands in the place of a message of that kind."""
    return st.one_of(
        requests(kind).map(lambda message: message.SerializeToString()),
        _damaged(kind),
        _large(kind),
        st.binary(max_size=100),
    )


def calls(methods: dict[str, type[Message]]) -> st.SearchStrategy[tuple[str, bytes]]:
    """A method, and what it is sent."""
    return st.one_of([st.tuples(st.just(name), raw(kind)) for name, kind in methods.items()])


@contextmanager
def no_fault_logged() -> Iterator[None]:
    """In the block nothing of ours breaks: no error, no traceback; and what clients say makes no log grow."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    for record in records:
        assert record.levelno < logging.ERROR and not record.exc_info, record.getMessage()
        assert len(record.getMessage()) < 3000


async def outcome(call: Any) -> grpc.StatusCode:
    """Reads a call to its end, and gives its status: OK, or a refusal that says why."""
    async with asyncio.timeout(60):
        try:
            if isinstance(call, grpc.aio.UnaryUnaryCall):
                await call
            else:
                async for _ in call:
                    pass
        except grpc.aio.AioRpcError as error:
            assert error.details() and len(error.details()) < 2000, error
            return error.code()
    return grpc.StatusCode.OK
