"""Who runs in which step: exact batches."""

import pytest

from tests.core.builders import Engine, make_sequence
from tests.core.helpers import scheduled


def test_prefill_first_keeps_prefill_and_decode_apart() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 5, 3), make_sequence(2, 7, 3))
    engine.step()
    engine.add(make_sequence(3, 4, 2))
    engine.run()
    assert scheduled(engine) == [[5, 7], [4], [1, 1, 1], [1, 1]]


def test_chunked_mixes_decodes_with_chunks_that_fill_the_budget() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=8)
    engine.add(make_sequence(1, 3, 4), make_sequence(2, 12, 2))
    engine.run()
    assert scheduled(engine) == [[3, 5], [1, 7], [1, 1], [1]]


def test_chunk_limit_lets_several_prompts_share_a_step() -> None:
    engine = Engine(
        scheduling_policy="chunked",
        max_num_batched_tokens=1024,
        max_prefill_chunk=400,
        max_model_len=1024,
        num_blocks=256,
    )
    engine.add(*(make_sequence(id, 800, 4) for id in (1, 2, 3)))
    for _ in range(3):
        engine.step()
    assert scheduled(engine) == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_nobody_overtakes_a_long_prompt_when_prompts_are_not_split() -> None:
    engine = Engine(max_num_batched_tokens=20)
    engine.add(make_sequence(1, 12, 1), make_sequence(2, 16, 1), make_sequence(3, 2, 1))
    engine.run()
    assert scheduled(engine) == [[12], [16, 2]]


@pytest.mark.parametrize("quota", [1, 2, 4])
def test_decode_quota_bounds_prefill_steps_in_a_row(quota: int) -> None:
    engine = Engine(decode_quota=quota, max_num_batched_tokens=8, max_num_seqs=8)
    engine.add(decoder := make_sequence(1, 8, 100))
    engine.step()
    for id in range(2, 32):
        engine.add(make_sequence(id, 8, 1))
        engine.step()
    assert decoder.num_generated_tokens - 1 == 30 // (quota + 1)


def test_chunked_decoder_gains_a_token_every_step_under_sustained_arrivals() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=8)
    engine.add(decoder := make_sequence(1, 8, 100))
    engine.step()
    for id in range(2, 32):
        engine.add(make_sequence(id, 8, 1))
        engine.step()
    assert decoder.num_generated_tokens == 31


def test_priority_goes_first_and_ties_keep_their_order() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(*(make_sequence(id, 3, 1, priority=priority) for id, priority in [(1, 2), (2, 1), (3, 1), (4, 0)]))
    engine.run()
    assert list(engine.ended) == [4, 2, 3, 1]


def test_delay_factor_holds_prefills_back_while_others_decode() -> None:
    engine = Engine(scheduler_delay_factor=2.0)
    engine.add(make_sequence(1, 3, 10))
    engine.step()  # the fake runner says that this prefill took 0.01 s
    engine.add(make_sequence(2, 3, 1))
    assert engine.step().num_scheduled_tokens == [1]
    assert engine.scheduler.next_wakeup() == pytest.approx(engine.clock.now + 0.02)
    engine.clock.now += 0.021
    assert engine.step().num_scheduled_tokens == [3]


def test_delay_factor_does_not_matter_when_nothing_decodes() -> None:
    engine = Engine(scheduler_delay_factor=1000.0)
    engine.add(make_sequence(1, 3, 1))
    engine.run()
    engine.add(make_sequence(2, 3, 1))
    assert engine.step().num_scheduled_tokens == [3]


def test_watermark_keeps_blocks_free_beside_running_sequences() -> None:
    engine = Engine(num_blocks=10, watermark=0.2)
    engine.add(make_sequence(1, 64, 40), make_sequence(2, 64, 40))
    engine.step()
    engine.add(make_sequence(3, 1, 1))
    assert engine.scheduler.load().num_free_blocks == 2
    assert engine.step().num_scheduled_tokens == [1, 1]
    assert engine.scheduler.load().num_waiting == 1


def test_same_arrivals_give_the_same_batches() -> None:
    def batches() -> list[object]:
        engine = Engine(num_blocks=9, async_depth=1, scheduling_policy="chunked", max_num_batched_tokens=32)
        engine.add(*(make_sequence(id, 3 * id % 40 + 1, 20) for id in range(1, 12)))
        engine.run()
        return list(engine.batches)

    assert batches() == batches()


def test_batch_is_complete_and_later_blocks_come_as_deltas() -> None:
    engine = Engine(async_depth=1)
    engine.add(make_sequence(1, 15, 4))
    first = engine.step()
    (bound,) = first.new_sequences
    assert (bound.slot, bound.block_ids, bound.num_prompt_tokens) == (0, (0,), 15)
    assert first.input_ids == bound.token_ids
    second, third = engine.step(), engine.step()
    assert (list(second.input_ids), second.num_computed_tokens, second.new_block_ids) == ([-1], [15], [])
    assert (list(third.input_ids), third.num_computed_tokens, third.new_block_ids) == ([-1], [16], [(0, [1])])
    assert [batch.samples for batch in (first, second, third)] == [[True]] * 3


def test_chunks_before_the_last_do_not_sample() -> None:
    engine = Engine(scheduling_policy="chunked", max_num_batched_tokens=8)
    engine.add(make_sequence(1, 20, 1))
    engine.run()
    assert [batch.samples for batch in engine.batches] == [[False], [False], [True]]


def test_waiting_sequence_past_its_deadline_is_not_run() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(make_sequence(1, 3, 5), make_sequence(2, 3, 5, deadline=engine.clock.now + 1))
    engine.step()
    assert engine.scheduler.next_wakeup() == engine.clock.now + 1
    engine.clock.now += 1
    engine.step()
    assert (engine.ended[2].finish_reason.name, engine.tokens[2]) == ("DEADLINE", [])
    engine.run()
    assert len(engine.tokens[1]) == 5


def test_running_sequence_ends_at_its_deadline() -> None:
    engine = Engine(async_depth=1)
    engine.add(make_sequence(1, 3, 50, deadline=engine.clock.now + 1))
    for _ in range(4):
        engine.step()
    engine.clock.now += 2
    engine.run()
    assert engine.ended[1].finish_reason.name == "DEADLINE"
    engine.assert_drained()


def test_timings_and_load() -> None:
    engine = Engine()
    engine.add(make_sequence(1, 3, 2), make_sequence(2, 30, 9))
    load = engine.scheduler.load()
    assert (load.num_waiting, load.num_waiting_tokens) == (2, 33)
    engine.clock.now += 5
    engine.step()
    load = engine.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (2, 0, 3)
    engine.clock.now += 5
    engine.run()
    timings = engine.ended[1].timings
    assert (timings.queued, timings.scheduled, timings.first_token) == (100.0, 105.0, 105.0)
    load = engine.scheduler.load()
    assert (load.num_finished, load.num_generated_tokens, load.num_scheduled_tokens) == (2, 11, 42)


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "eos"), [(4, 0, ()), (4, 2, tuple(range(11))), (1, 0, ())], ids=["plain", "eos", "end"]
)
@pytest.mark.parametrize("depth", [0, 1])
def test_first_and_last_output_say_when_it_began_and_what_was_cached(max_tokens, min_tokens, eos, depth) -> None:
    engine, outputs = Engine(async_depth=depth), []
    engine.add(make_sequence(1, 40, 1))
    engine.run()
    engine.check = lambda: outputs.extend(engine.scheduler.take_outputs())
    prompt = [1000 + at for at in range(40)]
    engine.add(make_sequence(2, prompt, max_tokens, min_tokens=min_tokens, eos=eos))
    engine.run()
    told = [output for output in outputs if output.timings is not None]
    assert told == [outputs[0], outputs[-1]][: len(outputs)]
    assert {(output.num_cached_tokens, output.timings.first_token is None) for output in told} == {(32, False)}
