"""Stop strings end a completion where they begin, whatever the tokens; the worker hears of it."""

import pytest

from fissile.v1 import FinishReason, GenerateRequest, GenerationOptions, OutputOptions
from tests.fakes import tokenizer as toys
from tests.fakes.system import run_system
from tests.fakes.worker import FakeWorker, says

STOP_STRING = FinishReason.FINISH_REASON_STOP_STRING


def stopped(worker, stop, **options):
    """Answer with stop strings, once the system is quiet."""

    async def scenario(system):
        request = GenerateRequest(
            text="a", options=GenerationOptions(stop=stop, output=OutputOptions(token_ids=True), **options)
        )
        answer = await system.ask(request)
        await system.quiet()
        return answer

    return run_system(scenario, worker)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "A"), (True, "ABCDE")])
def test_a_stop_across_tokens_ends_text_tokens_and_usage(include, text, tokens_per_step):
    """Cases 47, 50."""
    worker = FakeWorker(says("ABCDEFGHIJ", eos=False), tokens_per_step=tokens_per_step)
    answer = stopped(worker, ["BCDE"], include_stop=include)
    assert (answer.text, answer.finishes[0].reason, answer.finishes[0].stop) == (text, STOP_STRING, "BCDE")
    assert toys.byte_level().decode(answer.tokens[0]) == "ABCDE"
    assert answer.usage.num_completion_tokens == 5


def test_the_worker_is_aborted_at_the_stop():
    """vllm#57052."""
    worker = FakeWorker(says("ABCDE" + "x" * 900, eos=False), step_seconds=0.01)
    answer = stopped(worker, ["E"])
    assert worker.aborted == [worker.received[0].id]
    assert answer.usage.num_completion_tokens == 5
    assert (answer.usage.num_cached_tokens, answer.timings.worker_queued.ToMilliseconds()) == (4, 7)
    assert worker.num_emitted <= 12


def test_a_stop_at_the_very_last_token_counts():
    answer = stopped(FakeWorker(says("ABC", eos=False)), ["C"], max_tokens=3)
    assert (answer.text, answer.finishes[0].reason) == ("AB", STOP_STRING)


@pytest.mark.parametrize(
    ("worker", "options", "reason"),
    [
        (FakeWorker(says("ABC")), {}, FinishReason.FINISH_REASON_EOS),
        (FakeWorker(says("ABCD", eos=False)), {"max_tokens": 3}, FinishReason.FINISH_REASON_LENGTH),
    ],
    ids=["eos", "length"],
)
def test_held_text_comes_out_at_every_end(worker, options, reason):
    """Case 48, smg#2203."""
    answer = stopped(worker, ["BCDE"], **options)
    assert (answer.text, answer.finishes[0].reason) == ("ABC", reason)


def test_text_that_was_no_stop_arrives():
    assert stopped(FakeWorker(says("ABCX")), ["BCDE"]).text == "ABCX"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a<|im_start|>")])
def test_a_special_token_as_stop_string(include, text):
    """Case 58: it has no text of its own, and ends the completion all the same."""
    answer = stopped(FakeWorker(says("a<|im_start|>b")), ["<|im_start|>"], include_stop=include)
    assert (answer.text, answer.finishes[0].reason) == (text, STOP_STRING)
    assert answer.finishes[0].stop == "<|im_start|>"
    assert answer.usage.num_completion_tokens == 2


def test_a_special_token_that_the_model_does_not_have_never_comes():
    """So it is no stop, and no reason to refuse the request: the client has named no token."""
    tokenizer = toys.byte_level()
    tokenizer.add_special_tokens(["<|late|>"])
    worker = FakeWorker(says("abc"), files=toys.files(tokenizer), vocab_size=tokenizer.token_to_id("<|late|>"))
    answer = stopped(worker, ["<|late|>", "c"])
    assert (answer.text, answer.finishes[0].stop) == ("ab", "c")


FALLBACK = toys.byte_fallback()
PARIS, END = FALLBACK.token_to_id("▁Paris"), FALLBACK.token_to_id("</s>")
NEWLINE, E1, E2 = (FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in (0x0A, 0xC3, 0xA9))


@pytest.mark.parametrize("tokens_per_step", [1, 100])
@pytest.mark.parametrize(
    ("tokens", "stop", "num_tokens"),
    [
        ([PARIS, NEWLINE, PARIS, PARIS], "\n", 2),
        ([PARIS, NEWLINE, END], "\n", 2),
        ([PARIS, NEWLINE, NEWLINE, END], "\n\n", 3),
        ([PARIS, E1, E2], "é", 3),
        ([PARIS, E1, E2, NEWLINE, 0xFF], "é\n", 4),
    ],
    ids=["followed", "eos", "two", "length", "longer"],
)
def test_a_stop_of_byte_tokens_ends_at_the_token_that_completes_it(tokens, stop, num_tokens, tokens_per_step):
    """A line end is a byte in Llama 2's vocabulary: a run of these is held back without stop strings, but not here."""
    worker = FakeWorker(lambda asked: tokens, files=toys.files(FALLBACK), tokens_per_step=tokens_per_step)
    answer = stopped(worker, [stop], max_tokens=len(tokens))
    assert (answer.text, answer.finishes[0].reason, answer.finishes[0].stop) == (" Paris", STOP_STRING, stop)
    assert (answer.tokens[0], answer.usage.num_completion_tokens) == (tokens[:num_tokens], num_tokens)


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"max_tokens": 2}, "A", STOP_STRING),
        ({"max_tokens": 2, "include_stop": True}, "A\ufffd", STOP_STRING),
        ({"max_tokens": 2, "min_tokens": 2}, "A", STOP_STRING),
        ({"max_tokens": 4, "min_tokens": 4}, "A\ufffdBB", FinishReason.FINISH_REASON_LENGTH),
    ],
)
def test_a_stop_that_only_the_end_completes_counts(options, text, reason):
    """A character that is cut off becomes text when nothing more comes."""
    first_of_two = toys.byte_level().encode("é", add_special_tokens=False).ids[0]
    a, b = (toys.byte_level().token_to_id(letter) for letter in "AB")
    answer = stopped(FakeWorker(lambda asked: [a, first_of_two, b, b]), ["\ufffd"], **options)
    assert (answer.text, answer.finishes[0].reason) == (text, reason)


def test_no_stop_before_min_tokens():
    answer = stopped(FakeWorker(says("ABABAB", eos=False)), ["AB"], min_tokens=3)
    assert (answer.text, answer.usage.num_completion_tokens) == ("AB", 4)
