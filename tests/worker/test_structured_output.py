"""A request with a grammar: the engine hears of it once that is compiled, and whatever comes before ends it once."""

import asyncio

import pytest
from google.rpc import code_pb2

from fissile.v1 import DrainRequest, FinishReason, SamplingParams, StructuredOutput
from tests.worker import harness
from tests.worker.harness import connect, expected, fault, quiet, run_all, run_worker, sequence, until
from worker.core.params import Grammar, GrammarKind
from worker.executor.errors import ExecutorDiedError
from worker.grammars import in_use
from worker.grammars.errors import GrammarError

ABORTED, ERROR = FinishReason.FINISH_REASON_ABORTED, FinishReason.FINISH_REASON_ERROR
DEADLINE, LENGTH = FinishReason.FINISH_REASON_DEADLINE, FinishReason.FINISH_REASON_LENGTH
GRAMMAR = Grammar(GrammarKind.REGEX, "a*")


def constrained(id, *args, regex="a*", **fields):
    return sequence(id, *args, **(_constrained(regex) | fields))


def group(size, **fields):
    return harness.group(size, list(range(20, 30)), **(_constrained("a*") | fields))


def _constrained(regex):
    sampling = SamplingParams(structured_output=StructuredOutput(regex=regex))
    # The fake model generates what it likes; its end-of-sequence token would end a test early.
    return {"sampling": sampling, "ignore_eos": False, "max_tokens": 2}


def hold(executor):
    executor.grammars.compiles_at_once = False


async def compiling(system, num_grammars=1):
    await until(lambda: len(system.executor.grammars.compiles) == num_grammars)


def test_a_compiled_grammar_changes_nothing_else():
    async def scenario(system):
        router = await run_all(system, constrained(1, [20, 21, 22]), sequence(2, [30, 31]))
        await quiet(system)
        return router

    router = run_worker(scenario)
    assert router.ended.keys() == {1, 2}


def test_the_engine_waits_for_the_grammar():
    """Others are served meanwhile."""
    message = constrained(1, [20, 21, 22])

    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(message)
        await compiling(system)
        await router.send(sequence(2, max_tokens=8))
        await router.finish(2)
        assert (router.tokens.get(1), router.ended.keys()) == (None, {2})
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.finish(1)
        await quiet(system)
        return router

    router = run_worker(scenario)
    assert router.tokens[1] == expected(message, 2)


def test_each_grammar_of_a_group_is_compiled_once():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(group(3))
        await compiling(system)
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.finish(1, 2, 3)
        await quiet(system)
        return len(system.executor.grammars.compiles)

    assert run_worker(scenario) == 1


def test_a_grammar_is_kept_from_its_first_sequence_to_its_last():
    other = Grammar(GrammarKind.REGEX, "b*")

    async def scenario(system):
        hold(system.executor)
        kept = system.executor.grammars.kept
        router = connect(system)
        await router.send(constrained(1), constrained(2), constrained(3, regex="b*"))
        await compiling(system, 2)
        assert kept == {GRAMMAR, other}
        await router.send(3)
        await router.finish(3)
        assert kept == {GRAMMAR}
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.finish(1, 2)
        await quiet(system)
        assert kept == set()

    run_worker(scenario)


def test_grammars_that_leave_no_room_are_refused_for_now(monkeypatch):
    """All members or none, and what is refused is not kept."""
    monkeypatch.setattr(in_use, "MAX_BYTES", 150_000)

    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1))
        await compiling(system)
        await router.send(constrained(2, regex="b*"), constrained(3))
        await router.finish(2)
        assert system.executor.grammars.kept == {GRAMMAR}
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.finish(1, 3)
        await router.send(constrained(4, regex="b*"))
        await compiling(system, 2)
        return router.ended

    ended = run_worker(scenario)
    assert ended[2].error_code == code_pb2.RESOURCE_EXHAUSTED
    assert ended[2].detail.startswith("sampling.structured_output: ")


@pytest.mark.parametrize("size", [1, 3])
def test_a_grammar_that_cannot_be_compiled_is_an_invalid_argument(size):
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(group(size))
        await compiling(system)
        system.executor.grammars.compiles[GRAMMAR].set_exception(GrammarError("unclosed group"))
        await router.finish(*range(1, size + 1))
        await quiet(system)
        return router.ended

    ended = run_worker(scenario)
    for id in range(1, size + 1):
        assert (ended[id].finish_reason, ended[id].error_code) == (ERROR, code_pb2.INVALID_ARGUMENT)
        assert fault(ended[id]) == "sampling.structured_output.regex: unclosed group"
        assert ended[id].index == id - 1


@pytest.mark.parametrize(
    ("fields", "path"),
    [({"json_schema": "{"}, "json_schema"), ({"json_object": True}, "json_object"), ({"grammar": "x"}, "grammar")],
)
def test_the_error_names_the_field_that_was_set(fields, path):
    sampling = SamplingParams()
    for name, value in fields.items():
        setattr(sampling.structured_output, name, value)

    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(sequence(1, sampling=sampling, ignore_eos=False))
        await compiling(system)
        (future,) = system.executor.grammars.compiles.values()
        future.set_exception(GrammarError("no"))
        await router.finish(1)
        return fault(router.ended[1])

    assert run_worker(scenario) == f"sampling.structured_output.{path}: no"


def test_an_executor_that_fails_while_it_compiles_makes_the_request_go_elsewhere():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1))
        await compiling(system)
        system.executor.grammars.compiles[GRAMMAR].set_exception(ExecutorDiedError("rank 0 has ended"))
        await router.finish(1)
        return router.ended[1]

    output = run_worker(scenario)
    assert (output.finish_reason, output.error_code, output.worker_failed) == (ERROR, code_pb2.UNAVAILABLE, True)


def test_abort_while_compiling():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1, [*range(20, 28)], generated=(28, 29), max_tokens=9))
        await compiling(system)
        await router.send(1, 1)
        await router.finish(1)
        submitted = system.executor.num_submitted
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.send(sequence(2))
        await router.finish(2)
        await quiet(system)
        return router, system.executor.num_submitted - submitted

    router, num_steps = run_worker(scenario, async_scheduling=False)
    output = router.ended[1]
    assert (output.finish_reason, output.detail, list(output.token_ids)) == (ABORTED, "aborted by the router", [])
    # Two tokens were resumed.
    assert output.token_offset == 2
    assert num_steps == 4


@pytest.mark.parametrize("aborted", [1, 2])
def test_abort_of_one_of_a_group_while_compiling_leaves_the_others(aborted):
    message = group(3)

    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(message)
        await compiling(system)
        await router.send(aborted)
        await router.finish(aborted)
        assert router.ended.keys() == {aborted}
        before = system.executor.runner.num_tokens
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.finish(1, 2, 3)
        await quiet(system)
        return router, system.executor.runner.num_tokens - before

    router, num_computed = run_worker(scenario, async_scheduling=False)
    assert (router.ended[aborted].finish_reason, router.tokens[aborted]) == (ABORTED, [])
    left = {1, 2, 3} - {aborted}
    assert {router.ended[id].finish_reason for id in left} == {LENGTH}
    assert {id: router.tokens[id] for id in left} == {id: expected(message, 2, id - 1) for id in left}
    # The prompt is computed once, whoever leads the group now.
    assert num_computed <= 10 + 1 + 2


def test_a_closed_stream_while_compiling():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(group(2))
        await compiling(system)
        router.call.cancel()
        await until(lambda: system.server._broker.num_open == 0)
        before = system.executor.num_submitted
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await quiet(system)
        return system.executor.num_submitted - before

    assert run_worker(scenario) == 0


def test_an_id_that_comes_again_while_compiling_ends_both():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1))
        await compiling(system)
        await router.send(sequence(1))
        await router.finish(1)
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await quiet(system)
        return router.ended[1].error_code

    assert run_worker(scenario) == code_pb2.ALREADY_EXISTS


def test_deadline_while_compiling():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(group(2, deadline_ms=50))
        await compiling(system)
        await router.finish(1, 2)
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await quiet(system)
        return {id: output.finish_reason for id, output in router.ended.items()}

    assert run_worker(scenario) == {1: DEADLINE, 2: DEADLINE}


def test_drain_waits_for_what_is_compiled_in_time():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1, max_tokens=1))
        await compiling(system)
        drain = asyncio.ensure_future(system.stub.Drain(DrainRequest()))
        await until(lambda: system.server._broker._door._refusal is not None)
        system.executor.grammars.compiles[GRAMMAR].set_result(None)
        await router.finish(1)
        return await drain

    result = run_worker(scenario)
    assert (result.num_finished, result.num_aborted) == (1, 0)


def test_drain_aborts_what_is_still_compiled():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1))
        await compiling(system)
        request = DrainRequest()
        request.timeout.FromMilliseconds(20)
        result = await system.stub.Drain(request)
        await router.finish(1)
        return result, router.ended[1]

    result, output = run_worker(scenario)
    assert (result.num_finished, result.num_aborted) == (0, 1)
    assert (output.finish_reason, output.detail) == (ABORTED, "the worker is shutting down")


def test_engine_failure_while_compiling():
    async def scenario(system):
        hold(system.executor)
        router = connect(system)
        await router.send(constrained(1))
        await compiling(system)
        system.executor.die()
        await router.finish(1)
        output, status = router.ended[1], await router.end()
        system.executor.grammars.compiles[GRAMMAR].set_exception(ExecutorDiedError("rank 0 has ended"))
        await until(lambda: system.server._broker.num_open == 0)
        return output, status

    output, (code, _) = run_worker(scenario)
    assert (output.finish_reason, output.error_code, code) == (ERROR, code_pb2.UNAVAILABLE, "UNAVAILABLE")
