"""Prefix caching through the scheduler: what is computed, what is found, what is never shared."""

import pytest

from tests.core.builders import Engine, expected_output, make_sequence
from worker.core.cache.kv_events import AllCleared, BlockRemoved, BlockStored

BOTH_INDEXES = pytest.mark.parametrize("prefix", ["hash", "radix"])
TOKENS = list(range(500, 600))


def cached(engine: Engine, prompt: list[int], **options: object) -> int:
    """Tokens that a new sequence with this prompt finds, after it has run to its end."""
    sequence = make_sequence(len(engine.ended) + 1, prompt, 1, **options)
    engine.add(sequence)
    engine.run()
    assert engine.tokens[sequence.id] == expected_output(make_sequence(0, prompt, 1), 256)[0]
    assert engine.ended[sequence.id].num_cached_tokens == sequence.num_cached_tokens
    return sequence.num_cached_tokens


@BOTH_INDEXES
def test_whole_prompt_hit_gives_back_the_last_block(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    found = [cached(engine, TOKENS[:length]) for length in (32, 32, 16, 1, 33)]
    assert found == [0, 16, 0, 0, 32]
    assert all(min(batch.num_scheduled_tokens) >= 1 for batch in engine.batches)


@BOTH_INDEXES
def test_whole_prompt_hit_with_blocks_of_one_token(prefix: str) -> None:
    engine = Engine(prefix=prefix, block_size=1)
    assert [cached(engine, TOKENS[:length]) for length in (8, 8, 4, 1)] == [0, 7, 3, 0]


@BOTH_INDEXES
def test_generated_blocks_are_found(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:10], 30))
    engine.run()
    # 10 + 30 tokens, of which the last was never computed: two full blocks.
    assert cached(engine, TOKENS[:10] + engine.tokens[1] + [7]) == 32


def test_partial_blocks_are_never_published() -> None:
    engine = Engine()
    engine.add(make_sequence(1, TOKENS[:28], 1))
    engine.run()
    assert engine.scheduler.load().num_cached_blocks == 1


@BOTH_INDEXES
def test_what_is_being_computed_is_found_when_it_is(prefix: str) -> None:
    engine = Engine(prefix=prefix, async_depth=1)
    engine.add(make_sequence(1, TOKENS[:40], 1))
    engine.submit()
    engine.add(early := make_sequence(2, TOKENS[:40], 1))
    engine.submit()
    engine.retire()
    engine.add(late := make_sequence(3, TOKENS[:40], 1))
    engine.run()
    # The early one waited for the first to be computed.
    assert (early.num_cached_tokens, late.num_cached_tokens) == (32, 32)


@BOTH_INDEXES
def test_of_equal_prompts_in_one_step_one_is_computed_and_stored(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:33], 2), make_sequence(2, TOKENS[:33], 2))
    assert engine.step().num_scheduled_tokens == [33]
    assert engine.step().num_scheduled_tokens == [1]
    engine.run()
    assert engine.tokens[1] == engine.tokens[2]
    assert engine.scheduler.load().num_cached_blocks == 2
    engine.assert_drained()


@BOTH_INDEXES
def test_hit_shares_the_blocks_of_a_running_sequence(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    engine.add(make_sequence(1, TOKENS[:48], 5))
    engine.step()
    engine.add(make_sequence(2, TOKENS[:40], 5))
    (bound,) = engine.step().new_sequences
    assert bound.block_ids == (0, 1, 3)
    assert engine.scheduler.load().num_used_blocks == 4
    engine.run()
    engine.assert_drained()


@BOTH_INDEXES
def test_salts_separate_tenants(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    found = [cached(engine, TOKENS[:40], salt=salt) for salt in (b"a", b"a", b"b", b"", b"b", b"")]
    assert found == [0, 32, 0, 0, 32, 32]


@BOTH_INDEXES
def test_constant_hash_function_gives_right_outputs(prefix: str) -> None:
    engine = Engine(prefix=prefix, hasher=lambda _: 1)
    for length in (40, 50, 40, 60):
        for start in (0, 20):
            cached(engine, TOKENS[start : start + length - 20])
    engine.assert_drained()


def test_oldest_content_is_evicted_first() -> None:
    engine = Engine(num_blocks=4)
    for start in (0, 20, 40):
        cached(engine, TOKENS[start : start + 17])
    assert engine.scheduler.load().num_evictions == 0
    cached(engine, TOKENS[60:93])  # takes the vacant block, then the two oldest
    assert engine.scheduler.load().num_evictions == 2
    assert cached(engine, TOKENS[40:57]) == 16


def test_free_hits_count_against_the_free_blocks() -> None:
    engine = Engine(num_blocks=4)
    engine.add(make_sequence(1, TOKENS[:48], 1))
    engine.run()
    engine.add(make_sequence(2, 16, 17))
    engine.step()
    engine.add(make_sequence(3, TOKENS[:49], 1))
    engine.step()
    assert engine.scheduler.load().num_waiting == 1, "three hits and one more do not fit into three"
    engine.run()
    engine.assert_drained()


def test_clearing_keeps_what_is_in_use() -> None:
    engine = Engine()
    engine.add(make_sequence(1, TOKENS[40:80], 1))
    engine.run()
    engine.add(make_sequence(2, TOKENS[:40], 3))
    engine.step()
    assert engine.scheduler.clear_prefix_cache() == 2, "the two full blocks of the sequence that has ended"
    assert engine.scheduler.load().num_evictions == 0
    engine.run()
    assert cached(engine, TOKENS[40:80]) == 0
    assert cached(engine, TOKENS[:40]) == 32
    engine.assert_drained()


def test_clearing_an_idle_cache_forgets_everything() -> None:
    engine = Engine()
    engine.add(make_sequence(1, TOKENS[:40], 3))
    engine.run()
    assert engine.scheduler.clear_prefix_cache() == 2
    assert engine.scheduler.clear_prefix_cache() == 0
    assert cached(engine, TOKENS[:40]) == 0


def test_hit_counters() -> None:
    engine = Engine()
    for _ in range(2):
        cached(engine, TOKENS[:40])
    load = engine.scheduler.load()
    assert (load.num_prefix_queries, load.num_prefix_hits) == (80, 32)


@BOTH_INDEXES
def test_secure_mode_clears_what_lost_its_content(prefix: str) -> None:
    engine = Engine(prefix=prefix, secure=True, num_blocks=4)
    cached(engine, TOKENS[:40])
    cached(engine, TOKENS[50:60])
    assert engine.batches[-1].blocks_to_zero == [2], "the partial block; the cached ones keep their content"
    cached(engine, TOKENS[30:90])
    assert sorted(engine.batches[-1].blocks_to_zero) == [0, 1, 3]


def test_state_groups_are_held_with_the_blocks() -> None:
    engine = Engine(num_groups=8, prefix="off", num_blocks=6)
    engine.add(*(make_sequence(id, 30, 20) for id in range(1, 5)))
    groups = {new.group_id for new in engine.step().new_sequences}
    assert groups == {0, 1, 2}
    engine.run()
    assert engine.scheduler.load().num_preemptions
    engine.assert_drained()


@BOTH_INDEXES
def test_events_replay_to_what_can_be_hit(prefix: str) -> None:
    engine = Engine(prefix=prefix, num_blocks=6)
    cached(engine, TOKENS[:40], salt=b"x")
    events = engine.scheduler.watch_kv_events()
    assert events is engine.scheduler.watch_kv_events()
    number, snapshot = events.snapshot()
    assert [(block.token_ids, block.salt) for block in snapshot] == [
        (tuple(TOKENS[:16]), b"x"),
        (tuple(TOKENS[16:32]), b""),
    ]
    view = {block.hash: block for block in snapshot}
    for start in (3, 20, 3, 40):
        cached(engine, TOKENS[start : start + 49])
    for _, event in events.since(number):
        match event:
            case BlockStored():
                view[event.hash] = event
            case BlockRemoved():
                del view[event.hash]
            case AllCleared():
                view.clear()
    assert view == {block.hash: block for block in events.snapshot()[1]}
    engine.scheduler.clear_prefix_cache()
    (last,) = events.since(events.last_number - 1)
    assert last == (events.last_number, AllCleared())


def test_reader_that_fell_behind_must_start_again() -> None:
    engine = Engine()
    events = engine.scheduler.watch_kv_events(capacity=3)
    cached(engine, TOKENS[:80])
    assert events.last_number == 5
    assert events.since(1) is None
    assert [number for number, _ in events.since(2)] == [3, 4, 5]
    assert events.since(5) == []
    assert events.since(6) is None


@BOTH_INDEXES
def test_rows_in_step_publish_their_next_blocks_one_after_another(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    engine.add(*(make_sequence(id, 16, 40) for id in (1, 2, 3)))
    num_events = []
    for _ in range(20):
        before = events.last_number
        engine.step()
        num_events.append(events.last_number - before)
    # Prompts at once; at the 17th step each has two full blocks.
    assert num_events == [3, *[0] * 15, 1, 1, 1, 0]


@BOTH_INDEXES
@pytest.mark.parametrize(("num_steps", "found"), [(16, 16), (17, 32), (18, 32)])
def test_block_that_is_published_late_is_there_when_its_sequence_leaves(
    prefix: str, num_steps: int, found: int
) -> None:
    engine = Engine(prefix=prefix)
    sequences = [make_sequence(id, 16, 40) for id in range(1, 5)]
    engine.add(*sequences)
    for _ in range(num_steps):
        engine.step()
    tokens = list(sequences[3].token_ids)
    for seq in sequences:
        engine.scheduler.abort(seq.id)
    engine.check()
    assert cached(engine, [*tokens[:32], *TOKENS[:8]]) == found


def test_block_whose_last_token_is_still_in_flight_is_not_published_with_its_sequence_gone() -> None:
    engine = Engine(async_depth=1)
    sequences = [make_sequence(id, 16, 40) for id in range(1, 5)]
    engine.add(*sequences)
    events = engine.scheduler.watch_kv_events()
    while sequences[3].num_computed_tokens < 32:
        engine.step()
    before = events.last_number
    engine.scheduler.abort(4)
    engine.retire()
    assert [event.token_ids[0] for _, event in events.since(before)] == [sequences[0].token_ids[16]]


def test_sequence_swapped_out_while_a_block_is_late_publishes_nothing_without_its_table() -> None:
    engine = Engine(async_depth=1, num_host_blocks=16, preemption_mode="swap")
    sequences = [make_sequence(id, 16, 40) for id in range(1, 5)]
    engine.add(*sequences)
    while sequences[3].num_computed_tokens < 32:
        engine.step()
    engine.scheduler._state.preempt(sequences[3])
    engine.retire()
    assert (sequences[3].num_computed_tokens, sequences[3].num_in_flight_tokens) == (32, 0)
    engine.scheduler.abort(4)
    engine.run()
    engine.assert_drained()
