"""Any bytes at all, to a worker: an answer or a typed error, each sequence one ending, and nothing stays open."""

import asyncio

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2
from hypothesis import given
from hypothesis import strategies as st

from fissile import v1
from fissile.v1 import ExecuteCommand, ExecuteRequest, ExecuteResponse, SequenceGroup
from tests import fuzzing
from tests.worker.harness import connect, quiet, run_worker, sequence

NAMES = ("GetWorker", "GetTokenizer", "GetLoad", "Drain", "Undrain", "ClearPrefixCache", "WatchKvEvents")
METHODS = {name: getattr(v1, f"{name}Request") for name in NAMES}
STREAMS = {"GetTokenizer", "WatchKvEvents"}


@st.composite
def nearly_good(draw):
    """A group that could run, with some fields that are any."""
    group = sequence(draw(st.integers(1, 3)))
    group.MergeFrom(draw(fuzzing.requests(SequenceGroup)))
    return ExecuteRequest(commands=[ExecuteCommand(group=group)]).SerializeToString()


EXECUTE = st.lists(st.one_of(nearly_good(), fuzzing.raw(ExecuteRequest)), min_size=1, max_size=3)
CALLS = st.one_of(st.tuples(st.just("Execute"), EXECUTE), fuzzing.calls(METHODS))


def sequences_of(sent):
    """Ids of all that must end."""
    commands = [command for raw in sent for command in ExecuteRequest.FromString(raw).commands]
    return {member.id for command in commands for member in command.group.sequences}


def execute(channel, sent):
    """The status of a stream of these messages. One that ends well has ended all it was sent, each for a reason. In a
    thread: grpc.aio calls it INTERNAL if the stream ends while it writes."""
    ended = []
    try:
        for raw in channel.stream_stream("/fissile.v1.WorkerService/Execute")(iter(sent), timeout=60):
            ended += [output for output in ExecuteResponse.FromString(raw).outputs if output.finish_reason]
    except grpc.RpcError as error:
        return error.code()
    assert {output.sequence_id for output in ended} == sequences_of(sent)
    assert code_pb2.INTERNAL not in {output.error_code for output in ended}
    return grpc.StatusCode.OK


def is_message(raw):
    try:
        ExecuteRequest.FromString(raw)
    except DecodeError:
        return False
    return True


@fuzzing.examples(6)
@given(batch=st.lists(CALLS, min_size=25, max_size=25))
def test_a_worker_answers_or_says_what_is_wrong_and_stays_whole(batch):
    async def scenario(system):
        with fuzzing.no_fault_logged():
            async with grpc.aio.insecure_channel(system.address) as channel:
                with_threads = grpc.insecure_channel(system.address)
                for method, sent in batch:
                    if method == "Execute":
                        code = await asyncio.to_thread(execute, with_threads, sent)
                        assert code is not grpc.StatusCode.OK or all(is_message(raw) for raw in sent)
                    else:
                        kind = channel.unary_stream if method in STREAMS else channel.unary_unary
                        timeout = 0.1 if method == "WatchKvEvents" else 60  # it has no end of its own
                        code = await fuzzing.outcome(kind(f"/fissile.v1.WorkerService/{method}")(sent, timeout=timeout))
                        if timeout < 60 and code is grpc.StatusCode.DEADLINE_EXCEEDED:
                            continue
                    assert code in {grpc.StatusCode.OK, *fuzzing.REFUSALS}, (method, code, str(sent)[:1000])
                    if method == "Drain":
                        await system.stub.Undrain(v1.UndrainRequest())
                with_threads.close()
            router = connect(system)
            await router.send(sequence(7))
            await router.finish(7)
            assert len(router.tokens[7]) == 4
            await quiet(system)

    run_worker(scenario)
