"""Which sequences a worker has forgotten, told from those that wait."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fissile.v1 import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    Sequence,
    SequenceGroup,
    StructuredOutput,
    WorkerLoad,
)
from router.fleet.sequences import STALL_SECONDS, STALL_STEPS, OpenSequences

LATE = STALL_SECONDS + 1
IDLE, QUEUE, SWAP = WorkerLoad(num_running=2), WorkerLoad(num_waiting=1), WorkerLoad(num_swapped=1)


class Listener:
    pass


def opened(num_prompt_tokens=10, ids=(1,), **sampling):
    """At second 0, of a worker that has made 1,000 steps."""
    sequences, sink = OpenSequences(), Listener()
    sequences.on_step(1000, IDLE)
    group = SequenceGroup(prompt_token_ids=[5] * num_prompt_tokens, sequences=[Sequence(id=id) for id in ids])
    group.sampling.CopyFrom(SamplingParams(**sampling))
    sequences.add(group, sink, 0.0)
    sequences.on_step(1000, IDLE, max(ids))
    return sequences, sink


def token(sequences, step, now, id=1, **fields):
    sequences.on_step(step, IDLE)
    return sequences.take(RequestOutput(sequence_id=id, token_ids=[7], **fields), now)


def stalled(sequences, now=LATE):
    return [sink for sink, _ in sequences.stalled(now)]


def test_a_running_sequence_that_gets_nothing_for_many_steps_is_stalled():
    sequences, sink = opened()
    token(sequences, 1001, 0.0)
    sequences.on_step(1001 + STALL_STEPS, IDLE)
    assert stalled(sequences) == []
    sequences.on_step(1002 + STALL_STEPS, IDLE)
    assert stalled(sequences, STALL_SECONDS) == []
    assert list(sequences.stalled(LATE)) == [
        (sink, f"the worker made {1 + STALL_STEPS} steps and none for it, while nobody waited")
    ]


@pytest.mark.parametrize("crowd", [QUEUE, SWAP])
def test_steps_with_a_queue_do_not_count(crowd):
    """It may have been preempted, and wait itself."""
    sequences, sink = opened()
    token(sequences, 1001, 0.0)
    sequences.on_step(3000, crowd)
    sequences.on_step(3000 + STALL_STEPS, IDLE)
    assert stalled(sequences) == []
    sequences.on_step(3001 + STALL_STEPS, IDLE)
    assert stalled(sequences) == [sink]


def test_before_its_first_token_it_has_a_step_for_each_token_of_its_prompt():
    sequences, sink = opened(num_prompt_tokens=500)
    sequences.on_step(1500 + STALL_STEPS, IDLE)
    assert stalled(sequences) == []
    sequences.on_step(1501 + STALL_STEPS, IDLE)
    assert stalled(sequences) == [sink]


def test_a_grammar_may_take_its_time_until_the_first_token():
    sequences, sink = opened(structured_output=StructuredOutput(regex="a"))
    sequences.on_step(100_000, IDLE)
    assert stalled(sequences) == []
    token(sequences, 100_001, 0.0)
    sequences.on_step(200_000, IDLE)
    assert stalled(sequences) == [sink]


def test_what_a_worker_did_before_it_had_taken_a_sequence_does_not_count():
    """Also where the router is late, and reads of many steps from before at once."""
    sequences, sink = OpenSequences(), Listener()
    sequences.add(SequenceGroup(prompt_token_ids=[5], sequences=[Sequence(id=3)]), sink, 0.0)
    sequences.on_step(100_000, IDLE, 2)
    sequences.on_step(101_000, IDLE, 2)
    assert stalled(sequences) == []
    sequences.on_step(102_000, IDLE, 4)
    assert stalled(sequences) == []
    sequences.on_step(102_002 + STALL_STEPS, IDLE, 4)
    assert stalled(sequences) == [sink]


def test_a_sink_with_several_stalled_sequences_comes_once():
    sequences, sink = opened(ids=(1, 2, 3))
    sequences.on_step(5000, IDLE)
    assert stalled(sequences) == [sink]


def test_the_last_output_closes_a_sequence():
    sequences, sink = opened()
    assert token(sequences, 1001, 0.0) is sink
    assert token(sequences, 1002, 0.0, finish_reason=FinishReason.FINISH_REASON_EOS) is sink
    assert token(sequences, 1003, 0.0) is None
    assert (len(sequences), sequences.forget(1)) == (0, False)


def test_a_thread_may_ask_whose_they_are_while_they_come_and_go():
    """As metrics do. Threads are switched as often as can be."""
    sequences, sink = opened(ids=range(1, 500))
    group = SequenceGroup(prompt_token_ids=[5], sequences=[Sequence(id=id) for id in range(500, 600)])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(lambda: [sequences.sinks for _ in range(300)])
            while not asking.done():
                sequences.add(group, sink, 0.0)
                for id in range(500, 600):
                    sequences.forget(id)
        assert all(sinks == {sink} for sinks in asking.result())
    finally:
        sys.setswitchinterval(before)
