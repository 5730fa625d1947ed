"""The prefix index against sets, and its bound."""

import gc
import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.prefixes.index import BYTES_PER_BLOCK, PrefixIndex

UNBOUNDED = 1 << 40
NAMES = "abc"
hashes = st.lists(st.integers(1, 12), max_size=6)
actions = st.tuples(st.sampled_from(["store", "use", "remove", "clear", "reopen"]), st.sampled_from(NAMES), hashes)


def opened(index, names=NAMES, max_blocks=None):
    return {name: index.open((name, 1), max_blocks) for name in names}


def found(index, *chain):
    """Blocks by worker's name."""
    return {name: num for (name, _), num in index.match(chain).items()}


@settings(max_examples=150, deadline=None)
@given(st.lists(actions, max_size=30), hashes)
def test_a_match_is_the_longest_beginning_that_a_worker_has(todo, asked):
    index = PrefixIndex(UNBOUNDED)
    views, oracle = opened(index), {name: set() for name in NAMES}
    for action, name, blocks in todo:
        match action:
            case "store" | "use":
                getattr(views[name], action)(blocks)
                oracle[name] |= set(blocks)
            case "remove":
                views[name].remove(blocks)
                oracle[name] -= set(blocks)
            case "clear":
                views[name].clear()
                oracle[name].clear()
            case "reopen":
                views[name].close()
                views[name] = index.open((name, 1))
                oracle[name].clear()
    expected = {}
    for name, has in oracle.items():
        num = next((i for i, hash in enumerate(asked) if hash not in has), len(asked))
        expected |= {name: num} if num else {}
    assert found(index, *asked) == expected
    assert {name: len(view) for name, view in views.items()} == {name: len(has) for name, has in oracle.items()}
    assert index.num_blocks == sum(map(len, oracle.values()))
    assert index._holders.keys() == set().union(*oracle.values())


def test_a_view_that_is_closed_leaves_nothing_and_its_bit_is_used_again():
    index = PrefixIndex(UNBOUNDED)
    for _ in range(100):
        views = opened(index)
        views["a"].store([1, 2])
        views["b"].store([1])
        for view in views.values():
            view.close()
            view.close()
    assert (index.num_blocks, index._holders, index._views, index._all_bits) == (0, {}, {}, 0)


def test_the_longest_unused_go_first_and_of_a_chain_its_end():
    index = PrefixIndex(UNBOUNDED)
    (view,) = opened(index, "a", max_blocks=8).values()
    view.use([1, 2, 3, 4])
    view.use([11, 12, 13, 14])
    view.use([1, 2, 3, 4])
    assert found(index, 11, 12, 13, 14) == {"a": 4}
    view.use([21])
    assert found(index, 11, 12, 13, 14) == {"a": 2}
    assert found(index, 1, 2, 3, 4) == {"a": 4}
    assert len(view) == 7


def test_over_the_bound_the_largest_view_drops_some():
    index = PrefixIndex(16 * BYTES_PER_BLOCK)
    views = opened(index, "ab")
    views["a"].store(range(12))
    views["b"].store(range(100, 105))
    assert (len(views["a"]), len(views["b"]), index.num_blocks) == (10, 5, 15)
    assert index.num_bytes <= 16 * BYTES_PER_BLOCK


def test_memory_is_within_the_bound():
    """Ten times as many blocks as fit, of five workers that share none."""
    rng = random.Random(1)
    max_bytes = 4000 * BYTES_PER_BLOCK
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(max_bytes)
    views = opened(index, "abcde")
    for _ in range(40_000 // 10):
        for view in views.values():
            view.store([rng.getrandbits(64), rng.getrandbits(64)])
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * 4000 < index.num_blocks <= 4000
    assert num_bytes <= max_bytes
