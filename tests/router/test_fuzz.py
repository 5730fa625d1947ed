"""Any bytes at all: an answer or a typed error of the client's, never a fault of ours, and nothing stays open."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fissile import v1
from fissile.errors import FissileError
from fissile.v1 import ChatMessage, ChatRequest, GenerateRequest, TokenizeRequest
from router.asking.checks import Limits
from router.asking.validation import validate
from tests import fuzzing
from tests.fakes.system import run_system
from tests.fakes.worker import FakeWorker, says
from tests.fuzzing import TEXTS, examples, requests
from tests.router import messages

LIMITS = Limits(vocab_size=400, max_model_len=64, max_prompt_bytes=1000, dp_size=2)
GENERATE = {"Generate": GenerateRequest, "Chat": ChatRequest}
OTHERS = {
    name: getattr(v1, f"{name}Request") for name in ("Tokenize", "Detokenize", "GetModel", "ListModels", "GetStats")
}
VALID = st.builds(GenerateRequest, text=st.text(st.characters(codec="utf-8"), min_size=1), options=messages.options())
VALID_CHAT = st.builds(
    ChatRequest,
    messages=st.lists(
        st.builds(ChatMessage, role=st.integers(1, 5), content=TEXTS, reasoning=TEXTS), min_size=1, max_size=3
    ),
    options=messages.options(for_chat=True),
)


def without_rank(request):
    request.options.ClearField("dp_rank")
    return request.SerializeToString()


CALLS = st.one_of(
    fuzzing.calls(GENERATE),
    fuzzing.calls(OTHERS),
    st.tuples(st.just("Generate"), VALID.map(without_rank)),
    st.tuples(st.just("Chat"), VALID_CHAT.map(without_rank)),
)


@examples(100)
@given(request=st.one_of(requests(GenerateRequest), requests(ChatRequest)))
def test_checks_raise_nothing_but_typed_errors(request):
    try:
        validate(request, LIMITS)
    except FissileError as error:
        assert error.code in fuzzing.REFUSALS


@examples(6)
@given(batch=st.lists(CALLS, min_size=25, max_size=25))
def test_a_router_answers_or_says_what_is_wrong_and_stays_whole(batch):
    async def scenario(system):
        with fuzzing.no_fault_logged():
            for method, raw in batch:
                kind = system.channel.unary_stream if method in GENERATE else system.channel.unary_unary
                code = await fuzzing.outcome(kind(f"/fissile.v1.GenerationService/{method}")(raw))
                assert code in {grpc.StatusCode.OK, *fuzzing.REFUSALS}, (method, code, raw[:1000])
            assert (await system.ask(GenerateRequest(text="good"))).text == "ok"
            await system.quiet()
            assert system.router.parts.admission.held_bytes.num_taken == 0

    run_system(scenario, FakeWorker(says("ok"), max_model_len=64, dp_size=2), allow_chat_template=True)


@pytest.mark.parametrize("num_bytes", [3, 100_000])
def test_long_texts_are_tokenised_like_short_ones(num_bytes):
    async def scenario(system):
        return await system.stub.Tokenize(TokenizeRequest(text="x" * num_bytes, add_special_tokens=False))

    answer = run_system(scenario, FakeWorker(says("ok")))
    assert b"".join(answer.tokens) == b"x" * num_bytes and len(answer.token_ids) == len(answer.tokens)
