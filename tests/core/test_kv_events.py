"""Events of the prefix cache: exact content, order and numbers."""

import pytest

from common.block_hash import ROOT_HASH, hash_chain
from tests.core.builders import Engine, make_sequence
from worker.core.cache.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvents

BOTH_INDEXES = pytest.mark.parametrize("prefix", ["hash", "radix"])
TOKENS = list(range(500, 600))
HASHES = hash_chain(TOKENS, 16)


def run(engine: Engine, prompt: list[int], **options: object) -> None:
    engine.add(make_sequence(len(engine.ended) + 1, prompt, 1, **options))
    engine.run()


def stored(index: int) -> BlockStored:
    """The event of block `index` of the chain of TOKENS."""
    parent = HASHES[index - 1] if index else ROOT_HASH
    return BlockStored(HASHES[index], parent, tuple(TOKENS[16 * index : 16 * index + 16]), b"")


@BOTH_INDEXES
def test_full_blocks_are_stored_parents_first_numbered_from_one(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:40])
    assert events.since(0) == [(1, stored(0)), (2, stored(1))]


@BOTH_INDEXES
def test_hit_stores_only_what_is_new(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    run(engine, TOKENS[:17])
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:49])
    assert events.since(0) == [(1, stored(1)), (2, stored(2))]


@BOTH_INDEXES
def test_duplicate_is_not_stored_again(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    engine.add(make_sequence(1, TOKENS[:33], 1), make_sequence(2, TOKENS[:33], 1))
    engine.run()
    assert events.since(0) == [(1, stored(0)), (2, stored(1))]


@BOTH_INDEXES
def test_nothing_is_stored_before_the_step_is_back(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    engine.add(make_sequence(1, TOKENS[:33], 1))
    engine.submit()
    assert events.last_number == 0
    engine.retire()
    assert events.last_number == 2


@BOTH_INDEXES
def test_generated_block_is_stored_when_it_is_full(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    engine.add(seq := make_sequence(1, TOKENS[:14], 10))
    numbers = []
    for _ in range(4):
        engine.step()
        numbers.append(events.last_number)
    assert numbers == [0, 0, 1, 1]
    (tokens,) = [event.token_ids for _, event in events.since(0)]
    assert tokens == tuple(seq.token_ids[:16])


@BOTH_INDEXES
def test_salt_is_named_on_the_first_block_only(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:33], salt=b"tenant")
    hashes = hash_chain(TOKENS[:32], 16, b"tenant")
    assert [event for _, event in events.since(0)] == [
        BlockStored(hashes[0], ROOT_HASH, tuple(TOKENS[:16]), b"tenant"),
        BlockStored(hashes[1], hashes[0], tuple(TOKENS[16:32]), b""),
    ]


@BOTH_INDEXES
def test_eviction_is_told_tail_first_and_before_what_takes_its_place(prefix: str) -> None:
    engine = Engine(prefix=prefix, num_blocks=3)
    run(engine, TOKENS[:33])
    events = engine.scheduler.watch_kv_events()
    other = list(range(48))
    run(engine, other)
    new = hash_chain(other, 16)
    assert [event if isinstance(event, BlockRemoved) else event.hash for _, event in events.since(0)] == [
        BlockRemoved(HASHES[1]),
        BlockRemoved(HASHES[0]),
        *new,
    ]


@BOTH_INDEXES
def test_evicted_block_is_stored_again_when_computed_again(prefix: str) -> None:
    engine = Engine(prefix=prefix, num_blocks=2)
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:17])
    run(engine, list(range(32)))
    before = events.last_number
    run(engine, TOKENS[:17])
    news = [event for _, event in events.since(before)]
    assert news[-1] == stored(0)
    assert all(isinstance(event, BlockRemoved) for event in news[:-1])


@BOTH_INDEXES
def test_clearing_is_one_event(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:33])
    assert engine.scheduler.clear_prefix_cache()
    assert events.since(2) == [(3, AllCleared())]
    assert events.snapshot() == (3, [])


@BOTH_INDEXES
def test_clearing_beside_a_running_sequence_removes_what_it_does_not_use(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:49])
    engine.add(make_sequence(9, TOKENS[:20], 4))
    engine.step()
    assert engine.scheduler.clear_prefix_cache() == 2
    assert events.since(3) == [(4, BlockRemoved(HASHES[2])), (5, BlockRemoved(HASHES[1]))]
    assert events.snapshot() == (5, [stored(0)])
    engine.run()
    engine.assert_drained()


@BOTH_INDEXES
def test_clearing_while_all_is_in_use_is_no_event(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    events = engine.scheduler.watch_kv_events()
    engine.add(make_sequence(1, TOKENS[:20], 4))
    engine.step()
    assert engine.scheduler.clear_prefix_cache() == 0
    assert events.since(0) == [(1, stored(0))]


@BOTH_INDEXES
def test_clearing_is_no_eviction(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    run(engine, TOKENS[:49])
    engine.add(make_sequence(9, TOKENS[:20], 4))
    engine.step()
    engine.scheduler.clear_prefix_cache()
    assert engine.scheduler.load().num_evictions == 0


@BOTH_INDEXES
def test_snapshot_holds_what_was_stored_before_anybody_listened(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    run(engine, TOKENS[:49])
    number, blocks = engine.scheduler.watch_kv_events().snapshot()
    assert (number, blocks) == (0, [stored(0), stored(1), stored(2)])


@BOTH_INDEXES
def test_snapshot_of_a_branch_names_each_block_once(prefix: str) -> None:
    engine = Engine(prefix=prefix)
    run(engine, TOKENS[:49])
    run(engine, [*TOKENS[:32], *range(17)])
    _, blocks = engine.scheduler.watch_kv_events().snapshot()
    branch = hash_chain([*TOKENS[:32], *range(16)], 16)[2]
    assert sorted(block.hash for block in blocks) == sorted([*HASHES[:3], branch])


def test_nothing_is_recorded_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an event was made for nobody")

    for name in ("stored", "removed", "cleared"):
        monkeypatch.setattr(KvEvents, name, fail)
    monkeypatch.setattr("worker.core.cache.hash_index.PublishedBlock", fail)
    monkeypatch.setattr("worker.core.cache.radix_index.PublishedBlock", fail)
    for prefix in ("hash", "radix"):
        engine = Engine(prefix=prefix, num_blocks=3)
        engine.checks_cache = False
        run(engine, TOKENS[:33])
        run(engine, list(range(48)))
        assert engine.scheduler.load().num_evictions == 2
        assert engine.scheduler.clear_prefix_cache()


def test_radix_index_hashes_nothing_for_a_hit() -> None:
    calls = []

    def hasher(data: bytes) -> int:
        calls.append(data)
        return len(calls)

    engine = Engine(prefix="radix", hasher=hasher)
    run(engine, TOKENS[:33])
    calls.clear()
    run(engine, TOKENS[:33])
    assert calls == []


def test_nobody_can_listen_without_a_prefix_cache() -> None:
    assert Engine(prefix="off").scheduler.watch_kv_events() is None


def test_first_listener_sets_the_capacity() -> None:
    engine = Engine()
    events = engine.scheduler.watch_kv_events(capacity=2)
    assert engine.scheduler.watch_kv_events(capacity=100) is events
    run(engine, TOKENS[:49])
    assert [number for number, _ in events.since(1)] == [2, 3]
    assert events.since(0) is None


@pytest.mark.parametrize("number", [-1, 3])
def test_numbers_that_were_never_given_have_no_answer(number: int) -> None:
    engine = Engine()
    events = engine.scheduler.watch_kv_events()
    run(engine, TOKENS[:33])
    assert events.since(number) is None


def test_nothing_new_is_an_empty_answer() -> None:
    engine = Engine()
    events = engine.scheduler.watch_kv_events()
    assert events.since(0) == []
