"""The streams of routers that send rubbish, ask for more than a message holds, or leave while they are written to."""

import asyncio
import logging

import pytest

from fissile.channel import aio_channel
from fissile.v1 import ExecuteResponse, RequestOutput, WorkerLoad
from tests.worker.harness import Router, connect, expected, group, quiet, run_worker, sequence, until
from worker.core.outputs import SequenceOutput
from worker.face import convert_outputs
from worker.face.convert_outputs import MAX_PART_ENTRIES, add_output, pieces_of
from worker.face.streams import MAX_JOINED_OUTPUTS, ExecuteStream

EXECUTE = "/fissile.v1.WorkerService/Execute"


def faults(records):
    return [record.getMessage() for record in records if record.exc_info or record.levelno >= logging.ERROR]


NO_MESSAGE = "the request is not a valid fissile.v1.ExecuteRequest"


@pytest.mark.parametrize(
    ("bytes_sent", "text"),
    [
        (b"\xff\xff\xff", NO_MESSAGE),
        (b"\x0a\x04\x0a\x02\x0a\xff", NO_MESSAGE),
        (b"\x0a\x05\x0a\x03\x0a\x01\xff", "commands.group.request_id: must be UTF-8"),
    ],
)
def test_bytes_that_are_no_message_end_their_stream_with_a_word(caplog, bytes_sent, text):
    """E8: one line in the log, a typed error, and other streams go on."""
    good = sequence(1, max_tokens=30)

    async def scenario(system):
        other = connect(system)
        await other.send(good)
        async with aio_channel(system.address) as channel:
            call = channel.stream_stream(EXECUTE, response_deserializer=ExecuteResponse.FromString)()
            await call.write(bytes_sent)
            end = await Router(call).end()
        await other.finish(1)
        await quiet(system)
        return other, end

    with caplog.at_level(logging.INFO):
        other, (code, details) = run_worker(scenario)
    assert (code, details) == ("INVALID_ARGUMENT", text)
    assert other.tokens[1] == expected(good, 30)
    lines = [record for record in caplog.records if "stream is ended" in record.getMessage()]
    assert (len(lines), faults(caplog.records)) == (1, [])


def test_routers_that_leave_while_they_are_written_to(caplog):
    """E8."""

    async def scenario(system):
        for number in range(40):
            router = connect(system)
            await router.send(group(8, max_tokens=200))
            await router.read_tokens(1, 1 + number % 3)
            router.call.cancel()
        await quiet(system)
        await until(lambda: not system.server._broker._streams)

    with caplog.at_level(logging.INFO):
        run_worker(scenario, max_model_len=300, num_blocks=2000)
    assert faults(caplog.records) == []


def test_log_probabilities_of_a_long_prompt_come_in_parts():
    """C8."""
    long = SequenceOutput(7, 2, 0, [])
    long.prompt_logprobs = [[(token, -1.0, 1)] * 65 for token in range(1000)]
    response = ExecuteResponse()
    add_output(response, long, 9)
    parts = response.outputs
    per_part = MAX_PART_ENTRIES // 65
    assert [part.prompt_logprobs_offset for part in parts] == list(range(0, 1000, per_part))
    assert [p.token_ids[0] for part in parts for p in part.prompt_logprobs] == list(range(1000))
    assert {(part.sequence_id, part.index) for part in parts} == {(9, 2)}


def test_what_a_step_brought_is_split_by_size(monkeypatch):
    monkeypatch.setattr(convert_outputs, "MAX_RESPONSE_BYTES", 1000)
    outputs = [RequestOutput(sequence_id=i, detail="x" * 90) for i in range(1, 100)]
    whole = ExecuteResponse(step=5, outputs=outputs, load=WorkerLoad(num_running=3), last_sequence_id=9)
    responses = list(pieces_of(whole))
    assert [output for response in responses for output in response.outputs] == outputs
    assert max(response.ByteSize() for response in responses) <= 1000
    said = {(response.step, response.load.num_running, response.last_sequence_id) for response in responses}
    assert said == {(5, 3, 9)}


def test_endings_without_a_step_share_a_message_and_keep_their_place():
    def ending(i):
        return ExecuteResponse(step=i, outputs=[RequestOutput(sequence_id=i)])

    async def scenario():
        stream = ExecuteStream(max_queued=4)
        for i in range(MAX_JOINED_OUTPUTS + 2):
            stream.push_endings(ending(i))
        stream.push(ending(5000))
        stream.push_endings(ending(5001))
        assert not stream.is_cut
        got = [await stream.next(0.01) for _ in range(4)]
        stream.push_endings(ending(5002))
        return [[output.sequence_id for output in response.outputs] for response in [*got, await stream.next(0.01)]]

    first, second, *others = asyncio.run(scenario())
    assert (len(first), second) == (MAX_JOINED_OUTPUTS, [MAX_JOINED_OUTPUTS, MAX_JOINED_OUTPUTS + 1])
    assert others == [[5000], [5001], [5002]]


def test_a_reader_that_is_far_behind_in_bytes_is_cut(monkeypatch):
    async def scenario():
        monkeypatch.setattr("worker.face.streams.MAX_QUEUED_BYTES", 1000)
        stream = ExecuteStream(max_queued=100)
        for _ in range(3):
            stream.push(ExecuteResponse(outputs=[RequestOutput(detail="x" * 400)]))
        return str(stream.cut.exception())

    assert asyncio.run(scenario()) == "the stream's reader is 2 messages of 812 bytes behind"
