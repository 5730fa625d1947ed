"""Generate end to end: client, router and a fake worker over real sockets."""

from fissile.v1 import FinishReason, GenerateRequest
from tests.fakes.system import run_system
from tests.fakes.worker import FakeWorker, says


def test_text_streams_and_ends_once():
    async def scenario(system):
        answer = await system.ask(GenerateRequest(text="The capital of France is", request_id="r1"))
        await system.quiet()
        return answer

    answer = run_system(scenario, FakeWorker(says(" Paris 😀 naïve")))
    assert answer.text == " Paris 😀 naïve"
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_EOS
    assert answer.finishes[0].stop_token_id == 2
    assert len(answer.messages) > 1
    assert {m.request_id for m in answer.messages} == {"r1"}
    assert answer.usage.num_cached_tokens == 4
    assert answer.timings.worker_queued.ToMilliseconds() == 7
    assert answer.timings.HasField("ttft") and answer.timings.HasField("tpot") and answer.timings.HasField("e2e")
