"""Of equal beginnings that come together one is computed, once; nobody else waits for it, and nobody waits in vain."""

import pytest

from tests.core.builders import Engine, expected_output, make_group, make_sequence
from tests.core.helpers import scheduled
from worker.core.batch import BatchOutput
from worker.core.params import SamplingParams
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason

SHARED = list(range(500, 532))
BOTH_INDEXES = pytest.mark.parametrize("prefix", ["hash", "radix"])
BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def sharing(id: int, num_own: int = 3, max_tokens: int = 3, **more: object) -> Sequence:
    """Two shared blocks, then tokens of its own."""
    return make_sequence(id, SHARED + [1000 * id + at for at in range(num_own)], max_tokens, **more)


def run(engine: Engine, *sequences: Sequence) -> None:
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in sequences}
    engine.add(*sequences)
    engine.run()
    assert engine.tokens == wanted
    engine.assert_drained()


@BOTH_INDEXES
@BOTH_DEPTHS
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
def test_one_computes_and_the_others_take_over(prefix: str, depth: int, policy: str) -> None:
    engine = Engine(prefix=prefix, async_depth=depth, scheduling_policy=policy)
    run(engine, *[sharing(id) for id in range(1, 9)])
    assert engine.runner.num_tokens == 32 + 8 * (3 + 2)
    assert engine.scheduler.load().num_prefix_hits == 7 * 32


@BOTH_INDEXES
def test_equal_prompts_share_all_but_the_last_token(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    run(engine, *[make_sequence(id, SHARED, 1) for id in (1, 2, 3)])
    assert scheduled(engine) == [[32], [16, 16]]


def test_who_shares_nothing_is_not_held_up() -> None:
    engine = Engine()
    run(engine, sharing(1, max_tokens=1), sharing(2, max_tokens=1), make_sequence(3, 20, 1))
    assert scheduled(engine) == [[35, 20], [3]]


def test_salts_do_not_wait_for_each_other() -> None:
    engine = Engine()
    run(engine, sharing(1, max_tokens=1, salt=b"a"), sharing(2, max_tokens=1, salt=b"b"))
    assert scheduled(engine) == [[35, 35]]


def test_a_chunk_is_taken_over_as_soon_as_it_is_there() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=32, max_prefill_chunk=16)
    first = make_sequence(1, SHARED[:16] + list(range(48)), 1)
    run(engine, first, sharing(2, max_tokens=1))
    # The second shares one block of four, and goes on beside the first when that one is there.
    assert scheduled(engine) == [[16], [16, 16], [16, 3], [16]]


@BOTH_DEPTHS
@pytest.mark.parametrize("reason", ["abort", "fail"])
def test_when_the_first_is_lost_the_next_computes(depth: int, reason: str) -> None:
    engine = Engine(async_depth=depth, scheduling_policy="chunked", max_num_batched_tokens=16)
    followers = [sharing(2), sharing(3)]
    wanted = {seq.id: expected_output(seq, 256)[0] for seq in followers}
    engine.add(sharing(1), *followers)
    engine.step()
    if reason == "abort":
        engine.scheduler.abort(1)
    else:
        engine.runner.failing_slots = {0}
        while 1 not in engine.ended:
            engine.step()
        engine.runner.failing_slots = set()
    engine.run()
    assert {id: engine.tokens[id] for id in wanted} == wanted
    assert engine.ended[1].finish_reason in (FinishReason.ABORTED, FinishReason.ERROR)
    engine.assert_drained()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_when_the_first_is_preempted_nobody_waits_for_it(mode: str) -> None:
    engine = Engine(
        num_blocks=5,
        num_host_blocks=8,
        preemption_mode=mode,
        scheduling_policy="chunked",
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    run(engine, make_sequence(9, 30, 30), sharing(1), sharing(2), sharing(3))
    assert engine.scheduler.load().num_preemptions


def test_a_follower_can_be_aborted_and_counts_as_waiting() -> None:
    engine = Engine(max_num_waiting=2, async_depth=1)
    engine.add(sharing(1))
    engine.submit()
    engine.add(sharing(2), sharing(3))
    engine.submit()
    assert engine.scheduler.load().num_waiting == 2
    assert engine.scheduler.abort(2)
    assert engine.scheduler.load().num_waiting == 1
    engine.retire()
    engine.run()
    assert engine.ended.keys() == {1, 2, 3}
    engine.assert_drained()


def test_a_prompt_whose_log_probabilities_are_asked_for_waits_for_nobody() -> None:
    engine = Engine()
    group = make_group(10, [*SHARED, 1], 2, 2)
    engine.scheduler.add_group(group)
    run_beside = sharing(1, max_tokens=2)
    run_beside.sampling = SamplingParams(num_prompt_logprobs=0)
    engine.add(run_beside)
    engine.step()
    assert scheduled(engine) == [[33, 35]]


@BOTH_INDEXES
def test_256_requests_compute_what_they_share_once(prefix: str) -> None:
    shared = list(range(4000))
    engine = Engine(num_blocks=2048, prefix=prefix, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=16384)
    for id in range(256):
        engine.scheduler.add(make_sequence(id, shared + [10_000 * id + at for at in range(20)], 1))
    num_tokens = 0
    while engine.scheduler.has_unfinished():
        batch = engine.scheduler.schedule()
        num_tokens += batch.num_tokens
        rows = [[7] if samples else [] for samples in batch.samples]
        engine.scheduler.postprocess(batch, BatchOutput(step=batch.step, token_ids=rows))
    assert num_tokens == 4000 + 256 * 20
    engine.scheduler.check_integrity()
