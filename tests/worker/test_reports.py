"""What leaves at once, what waits for the end of a pause, and that nothing is lost or out of order on the way."""

import asyncio
import threading
from dataclasses import replace

import pytest

from worker.core.outputs import SequenceOutput, SequenceTimings
from worker.core.stopping import FinishReason
from worker.engine.engine import StepReport
from worker.engine.reports import MAX_RATE, OUTPUTS_PER_MESSAGE, Reports, joined_outputs, longest_pause, output_rate
from worker.engine.steps import FinishedStep

NEVER = 1e-9
"""A rate at which each pause is the longest there is."""


SHORT = OUTPUTS_PER_MESSAGE / 0.02
"""A rate at which a pause is of 20 ms."""


def report(step, *outputs, is_urgent=False, step_seconds=None):
    finished = None if step_seconds is None else FinishedStep(None, step_seconds, step_seconds, 0.0)
    return StepReport(step, list(outputs), [], None, finished, is_urgent)


def tokens(sequence_id, offset, *token_ids, **fields):
    return SequenceOutput(sequence_id, 0, offset, list(token_ids), **fields)


def delivered(scenario, rate=NEVER, longest=0.05):
    """Steps of each delivery."""
    deliveries = []

    async def run():
        reports = Reports(lambda several: deliveries.append([one.step for one in several]), rate=rate, longest=longest)
        await scenario(reports, deliveries)

    asyncio.run(run())
    return deliveries


async def turns():
    for _ in range(3):
        await asyncio.sleep(0)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def test_what_comes_after_a_quiet_time_leaves_at_once_and_what_follows_leaves_together():
    async def scenario(reports, deliveries):
        reports.post(report(1))
        await turns()
        assert deliveries == [[1]]
        for step in (2, 3, 4):
            reports.post(report(step))
        await turns()
        assert deliveries == [[1]]
        await until(lambda: len(deliveries) == 2)

    assert delivered(scenario) == [[1], [2, 3, 4]]


def test_what_is_urgent_ends_the_pause_and_takes_along_what_waits():
    async def scenario(reports, deliveries):
        reports.post(report(1))
        await turns()
        reports.post(report(2))
        reports.post(report(3, is_urgent=True))
        await turns()
        assert deliveries == [[1], [2, 3]]
        reports.post(report(4))
        await turns()
        assert len(deliveries) == 2
        reports.flush()

    assert delivered(scenario, longest=3600.0) == [[1], [2, 3], [4]]


def test_the_next_one_leaves_at_once_after_a_pause_in_which_nothing_came():
    async def scenario(reports, deliveries):
        reports.post(report(1))
        await turns()
        await asyncio.sleep(0.05)
        reports.post(report(2))
        await turns()

    assert delivered(scenario, SHORT) == [[1], [2]]


def test_what_waits_at_the_end_of_a_pause_leaves_with_the_next_step():
    async def scenario(reports, deliveries):
        reports.post(report(1, step_seconds=1000.0))
        await turns()
        reports.post(report(2))
        await asyncio.sleep(0.05)
        assert deliveries == [[1]]
        reports.post(report(3))
        await turns()

    assert delivered(scenario, SHORT, longest=3600.0) == [[1], [2, 3]]


def test_what_waits_does_not_wait_for_a_step_that_is_longer_than_the_last_one():
    async def scenario(reports, deliveries):
        reports.post(report(1, step_seconds=0.01))
        await turns()
        reports.post(report(2))
        await until(lambda: len(deliveries) == 2)

    assert delivered(scenario, SHORT) == [[1], [2]]


def test_each_report_of_another_thread_arrives_once_and_in_order():
    async def scenario(reports, deliveries):
        def steps():
            for step in range(5000):
                reports.post(report(step, is_urgent=step % 7 == 0))

        thread = threading.Thread(target=steps)
        thread.start()
        await until(lambda: sum(map(len, deliveries)) == 5000)
        thread.join()

    deliveries = delivered(scenario, rate=100_000)
    assert [step for steps in deliveries for step in steps] == list(range(5000))


def test_tokens_of_several_steps_become_one_output():
    first, second = tokens(1, 4, 10), tokens(1, 5, 11)
    end = tokens(1, 6, 12, finish_reason=FinishReason.LENGTH, num_cached_tokens=3)
    other = tokens(2, 0, 20)
    joined = joined_outputs([report(1, first), report(2, other, second), report(3, end)])
    assert joined == [tokens(1, 4, 10, 11, 12, finish_reason=FinishReason.LENGTH, num_cached_tokens=3), other]


def test_what_comes_with_the_first_token_stays_with_it():
    timings = SequenceTimings(1.0, 2.0, 3.0, 0)
    first = tokens(1, 0, 10, num_cached_tokens=3, timings=timings)
    (joined,) = joined_outputs([report(1, first), report(2, tokens(1, 1, 11)), report(3, tokens(1, 2, 12))])
    assert joined == tokens(1, 0, 10, 11, 12, num_cached_tokens=3, timings=timings)
    first = tokens(1, 0, 10, num_cached_tokens=3, timings=timings)
    end = tokens(1, 1, 11, finish_reason=FinishReason.LENGTH, num_cached_tokens=3, timings=replace(timings, queued=0.0))
    (joined,) = joined_outputs([report(1, first), report(2, end)])
    assert (joined.token_ids, joined.timings) == ([10, 11], replace(timings, queued=0.0))


def test_log_probabilities_stay_with_their_tokens():
    def likely(token):
        return [(token, -0.5, 1)]

    first, second = tokens(1, 0, 10, logprobs=[likely(10)]), tokens(1, 1, 11, logprobs=[likely(11)])
    aborted = tokens(1, 2, finish_reason=FinishReason.ABORTED)
    (joined,) = joined_outputs([report(1, first), report(2, second), report(3, aborted)])
    assert (joined.token_ids, joined.logprobs) == ([10, 11], [likely(10), likely(11)])
    assert joined.finish_reason is FinishReason.ABORTED


def test_log_probabilities_of_the_prompt_come_alone_and_before_tokens():
    def part(offset):
        return SequenceOutput(1, 0, 0, [], prompt_logprobs=[[(5, -1.0, 1)]], prompt_logprobs_offset=offset)

    outputs = [part(0), part(1), tokens(1, 0, 10), tokens(1, 1, 11)]
    joined = joined_outputs([report(step, output) for step, output in enumerate(outputs)])
    assert joined == [part(0), part(1), tokens(1, 0, 10, 11)]


@pytest.mark.parametrize(
    ("asked", "device", "rate"),
    [(None, "cuda:0", MAX_RATE), (None, "cpu", 800), (50.0, "cpu", 50), (50.0, "cuda:0", 50)],
)
def test_a_model_on_the_same_cores_leaves_less_to_messages(asked, device, rate):
    assert output_rate(asked, device, num_cores=4) == rate


def test_it_may_also_wait_longer_for_them():
    assert longest_pause("cuda:0") < longest_pause("cpu")
