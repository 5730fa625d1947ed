"""Any message at all: an answer or a typed error of the client's, never a fault of ours, and nothing stays open."""

import grpc
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from fissile.errors import FissileError
from fissile.v1 import ChatMessage, ChatRequest, GenerateRequest
from router.asking.checks import Limits
from router.asking.validation import validate
from tests.fakes.system import collect, run_system
from tests.fakes.worker import FakeWorker, says
from tests.router import messages

LIMITS = Limits(vocab_size=400, max_model_len=64, max_prompt_bytes=1000, dp_size=2)
CLIENTS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.one_of(st.integers(0, 500), st.integers(0, 2**32 - 1)),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.one_of(st.floats(-3, 3, width=32), st.floats(width=32)),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.sampled_from(["{}", "[" * 3000, '{"a": "\\ud800"}', "1e999", "<|im_end|>", " ", "\0", "NaN"]),
)


MAX_DEPTH = 6


def value_of(field, depth):
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=300)
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return message_of(field.message_type, depth + 1)
    return NUMBERS[field.cpp_type]


def message_of(descriptor, depth=0):
    """Fields of a message by name; recursion ends after some levels."""
    if depth > MAX_DEPTH:
        return st.just({})
    if descriptor.full_name == "google.protobuf.Struct":
        return st.dictionaries(TEXTS, st.one_of(st.floats(), TEXTS, st.none(), st.lists(st.floats(), max_size=2)))
    fields = {
        field.name: st.lists(value_of(field, depth), max_size=4) if field.is_repeated else value_of(field, depth)
        for field in descriptor.fields
    }
    oneofs = [[field.name for field in oneof.fields] for oneof in descriptor.oneofs]

    def one_each(values):
        for names in oneofs:
            for name in [name for name in names if name in values][1:]:
                del values[name]
        return values

    return st.fixed_dictionaries({}, optional=fields).map(one_each)


def requests(kind):
    return message_of(kind.DESCRIPTOR).map(lambda values: kind(**values))


EITHER = st.one_of(requests(GenerateRequest), requests(ChatRequest))
VALID = st.builds(GenerateRequest, text=st.text(st.characters(codec="utf-8"), min_size=1), options=messages.options())
VALID_CHAT = st.builds(
    ChatRequest,
    messages=st.lists(
        st.builds(ChatMessage, role=st.integers(1, 5), content=TEXTS, reasoning=TEXTS), min_size=1, max_size=3
    ),
    options=messages.options(for_chat=True),
)


@settings(max_examples=300)
@given(request=EITHER)
def test_checks_raise_nothing_but_typed_errors(request):
    try:
        validate(request, LIMITS)
    except FissileError as error:
        assert error.code in CLIENTS_FAULT


@settings(max_examples=8)
@given(batch=st.lists(st.one_of(EITHER, VALID, VALID_CHAT), min_size=20, max_size=20))
def test_a_router_answers_or_says_what_is_wrong_and_stays_whole(batch):
    for request in batch:
        request.model = ""
        request.options.ClearField("dp_rank")

    async def scenario(system):
        for request in batch:
            method = system.stub.Chat if isinstance(request, ChatRequest) else system.stub.Generate
            try:
                await collect(method(request, timeout=2))
            except grpc.aio.AioRpcError as error:
                assert error.code() in CLIENTS_FAULT, (request, error)
        await system.quiet()

    run_system(scenario, FakeWorker(says("ok"), max_model_len=64, dp_size=2), allow_chat_template=True)
