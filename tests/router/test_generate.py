"""Generate end to end: client, router and a fake worker over real sockets."""

from itertools import pairwise

import pytest

from fissile.v1 import (
    BeamHypothesis,
    BeamSearch,
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    RequestOutput,
    SamplingParams,
    TokenSequence,
)
from tests.fakes import tokenizer as toys
from tests.fakes.asked import EOS
from tests.fakes.system import error_of, run_system
from tests.fakes.worker import FakeWorker, counts, says

PROMPT = "The capital of France is"


def generate(worker, text=PROMPT, *, output=None, sampling=None, request_id="", settings=None, **options):
    """The answer, once the system is quiet again."""
    request = GenerateRequest(
        text=text, request_id=request_id, options=GenerationOptions(output=output, sampling=sampling, **options)
    )

    async def scenario(system):
        answer = await system.ask(request)
        await system.quiet()
        return answer

    return run_system(scenario, worker, **(settings or {}))


def test_text_streams_and_ends_once():
    answer = generate(FakeWorker(says(" Paris 😀 naïve")), request_id="r1")
    assert answer.text == " Paris 😀 naïve"
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_EOS
    assert answer.finishes[0].stop_token_id == EOS
    assert len(answer.messages) > 1
    assert {m.request_id for m in answer.messages} == {"r1"}
    assert answer.usage.num_cached_tokens == 4
    assert answer.timings.worker_queued.ToMilliseconds() == 7
    assert answer.timings.HasField("ttft") and answer.timings.HasField("tpot") and answer.timings.HasField("e2e")


def test_every_default_is_filled_in_for_the_worker():
    worker = FakeWorker(says("x"), files=toys.files(toys.byte_level(), temperature=0.6, top_k=20))
    generate(worker)
    (sequence,) = worker.received
    assert not sequence.group.HasField("max_tokens")
    assert sequence.num_prompt_tokens == len(sequence.token_ids)
    assert sequence.sampling.temperature == pytest.approx(0.6)
    assert (sequence.sampling.top_k, sequence.sampling.top_p, sequence.sampling.min_p) == (20, 1.0, 0.0)
    assert (len(sequence.group.sequences), sequence.index, sequence.member.HasField("seed")) == (1, 0, True)


def test_what_the_request_sets_wins():
    worker = FakeWorker(says("x"), files=toys.files(toys.byte_level(), temperature=0.6, top_k=20))
    generate(worker, sampling=SamplingParams(temperature=0, top_k=-1, seed=9), max_tokens=5, priority=-3)
    (sequence,) = worker.received
    assert (sequence.sampling.temperature, sequence.sampling.top_k, sequence.sampling.seed) == (0, 0, 9)
    group = sequence.group
    assert (group.max_tokens, group.priority) == (5, -3)


def test_unset_seeds_differ():
    worker = FakeWorker(says("x"))

    async def scenario(system):
        for _ in range(2):
            await system.ask(GenerateRequest(text=PROMPT))

    run_system(scenario, worker)
    assert worker.received[0].sampling.seed != worker.received[1].sampling.seed


def test_one_token():
    answer = generate(FakeWorker(says(" Paris", eos=False)), max_tokens=1, output=OutputOptions(token_ids=True))
    assert answer.finishes[0].reason == FinishReason.FINISH_REASON_LENGTH
    assert (answer.usage.num_completion_tokens, len(answer.tokens[0])) == (1, 1)
    assert not answer.timings.HasField("tpot")


def test_usage_counts_the_eos_token_and_its_text_is_hidden():
    answer = generate(FakeWorker(says("a")), output=OutputOptions(token_ids=True), skip_special_tokens=False)
    assert (answer.text, answer.tokens[0][-1], answer.usage.num_completion_tokens) == ("a", EOS, 2)


def test_special_tokens_on_the_way_are_skipped_unless_asked_for():
    script = says("a<|im_start|>b")
    assert generate(FakeWorker(script)).text == "ab"
    assert generate(FakeWorker(script), skip_special_tokens=False).text == "a<|im_start|>b"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_is_text_only_when_asked_for(include, text):
    (stop,) = toys.byte_level().encode("c", add_special_tokens=False).ids
    answer = generate(FakeWorker(says("abcab")), stop_token_ids=[stop], include_stop=include)
    assert (answer.text, answer.finishes[0].reason) == (text, FinishReason.FINISH_REASON_STOP_TOKEN)
    assert answer.finishes[0].stop_token_id == stop


def test_n_completions_are_one_group_with_consecutive_seeds_and_one_prompt():
    worker = FakeWorker(counts(5))
    answer = generate(worker, n=3, sampling=SamplingParams(seed=2**64 - 1), output=OutputOptions(token_ids=True))
    assert [s.sampling.seed for s in worker.received] == [2**64 - 1, 0, 1]
    assert [s.index for s in worker.received] == [0, 1, 2]
    assert [len(group.sequences) for group in worker.groups] == [3]
    assert worker.batches[0] == 1
    assert sorted(answer.finishes) == [0, 1, 2]
    assert answer.usage.num_prompt_tokens == worker.received[0].num_prompt_tokens
    assert (answer.usage.num_completion_tokens, answer.usage.num_cached_tokens) == (15, 4)
    assert answer.tokens[0] != answer.tokens[1]


def test_beam_search_returns_the_best_hypotheses_with_scores():
    ids = toys.byte_level().encode(" Paris", add_special_tokens=False).ids
    eos, length = FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_LENGTH
    result = RequestOutput(
        finish_reason=length,
        hypotheses=[
            BeamHypothesis(token_ids=[*ids, EOS], score=-0.5, finish_reason=eos),
            BeamHypothesis(token_ids=ids, score=-0.75, finish_reason=length),
            BeamHypothesis(token_ids=ids, score=-1.0, finish_reason=length),
        ],
    )
    worker = FakeWorker(says("x"), refuse=result, capabilities=["beam_search"])
    answer = generate(worker, n=2, sampling=SamplingParams(beam_search=BeamSearch(width=3)))
    assert answer.texts == {0: " Paris", 1: " Paris"}
    assert [(answer.finishes[i].reason, answer.finishes[i].score) for i in (0, 1)] == [(eos, -0.5), (length, -0.75)]
    assert answer.usage.num_completion_tokens == 2 * len(ids) + 1
    (sequence,) = worker.received
    assert (sequence.sampling.beam_search.width, len(sequence.group.sequences)) == (3, 1)


def test_beam_search_is_refused_where_workers_do_not_offer_it():
    async def scenario(system):
        sampling = SamplingParams(beam_search=BeamSearch(width=3))
        return await error_of(system.ask(GenerateRequest(text=PROMPT, options=GenerationOptions(sampling=sampling))))

    error = run_system(scenario, FakeWorker(says("x")))
    assert error.reason == "UNIMPLEMENTED"
    assert "options.sampling.beam_search" in error.message


def test_final_only_is_one_message():
    answer = generate(FakeWorker(says(" Paris is")), output=OutputOptions(final_only=True, token_ids=True))
    assert (len(answer.messages), answer.text) == (1, " Paris is")
    assert len(answer.tokens[0]) == answer.usage.num_completion_tokens


def test_cumulative_messages_carry_everything_so_far():
    answer = generate(FakeWorker(says(" Paris is"), step_seconds=0.01), output=OutputOptions(cumulative=True))
    texts = [m.completions[0].text for m in answer.messages]
    assert texts[-1] == " Paris is"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_without_text_only_tokens_come():
    answer = generate(FakeWorker(says("abc")), output=OutputOptions(text=False, token_ids=True))
    assert answer.text == ""
    assert toys.byte_level().decode(answer.tokens[0]) == "abc"


def test_the_prompts_tokens_come_once_in_the_first_message():
    worker = FakeWorker(says(" Paris is"), step_seconds=0.01)
    answer = generate(worker, output=OutputOptions(prompt_token_ids=True))
    assert list(answer.messages[0].prompt_token_ids) == list(worker.received[0].token_ids)
    assert not any(m.prompt_token_ids for m in answer.messages[1:])


def test_heartbeats_fill_the_silence():
    output = OutputOptions()
    output.heartbeat.FromMilliseconds(20)
    answer = generate(FakeWorker(says("a"), step_seconds=0.3), output=output)
    empty = [m for m in answer.messages if not m.completions]
    assert answer.text == "a"
    assert len(empty) >= 3


def test_bos_is_added_unless_not_wanted():
    """smg#1637: both ways in one router, the same text."""
    worker = FakeWorker(says("x"))

    async def scenario(system):
        for special in (True, False, True):
            await system.ask(GenerateRequest(text="hello", add_special_tokens=special))

    run_system(scenario, worker)
    ids = toys.byte_level().encode("hello", add_special_tokens=False).ids
    assert [list(s.token_ids) for s in worker.received] == [[0, *ids], ids, [0, *ids]]


def test_a_prompt_of_tokens_goes_through_as_it_is():
    worker = FakeWorker(says("x"))

    async def scenario(system):
        await system.ask(GenerateRequest(tokens=TokenSequence(token_ids=[5, 6, 399])))

    run_system(scenario, worker)
    assert list(worker.received[0].token_ids) == [5, 6, 399]


def test_a_character_cut_off_by_the_limit_ends_as_one_replacement_character():
    """Case 56: text shown is what decoding the tokens gives."""
    ids = toys.byte_level().encode("a😀", add_special_tokens=False).ids
    answer = generate(FakeWorker(says("a😀", eos=False)), max_tokens=len(ids) - 1)
    assert answer.text == "a\ufffd"


def test_token_ids_come_only_when_asked_for():
    assert generate(FakeWorker(says("a😀b"))).tokens[0] == []


def test_a_completion_that_ended_is_not_sent_again_with_the_others():
    """Cumulative: its end comes once, however long the others go on."""

    def script(sequence):
        return counts(3 if sequence.index == 0 else 30)(sequence)

    answer = generate(FakeWorker(script, step_seconds=0.01), n=2, output=OutputOptions(cumulative=True, token_ids=True))
    with_first = [m for m in answer.messages if any(d.index == 0 for d in m.completions)]
    assert len(with_first) <= 3
    assert len(answer.messages) > 5
