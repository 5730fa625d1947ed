"""The queue of waiting sequences: order, removal from the middle, sizes."""

import pytest

from tests.core.builders import make_sequence
from worker.core.scheduling.lazy_heap import LazyHeap


def heap_of(*keys: tuple[int, int]) -> LazyHeap[int]:
    """A heap from pairs of (key, sequence id); each sequence has as many tokens as its id."""
    heap: LazyHeap[int] = LazyHeap()
    for key, id in keys:
        heap.push(key, make_sequence(id, id))
    return heap


def drain(heap: LazyHeap[int]) -> list[int]:
    ids = []
    while (head := heap.peek()) is not None:
        ids.append(head[1].id)
        heap.discard(head[1].id)
    return ids


def test_least_key_comes_first() -> None:
    assert drain(heap_of((3, 1), (1, 2), (2, 3))) == [2, 3, 1]


def test_equal_keys_come_in_order_of_id_and_are_never_compared_as_sequences() -> None:
    assert drain(heap_of((5, 3), (5, 1), (5, 2))) == [1, 2, 3]


def test_peek_leaves_the_head_inside() -> None:
    heap = heap_of((1, 7))
    assert heap.peek()[1].id == heap.peek()[1].id == 7
    assert len(heap) == 1


def test_empty_heap_has_no_head() -> None:
    assert LazyHeap().peek() is None


def test_discard_from_the_middle() -> None:
    heap = heap_of((1, 1), (2, 2), (3, 3))
    heap.discard(2)
    assert 2 not in heap
    assert drain(heap) == [1, 3]


def test_discard_of_a_stranger_changes_nothing() -> None:
    heap = heap_of((1, 1))
    heap.discard(9)
    assert (len(heap), heap.num_tokens) == (1, 1)


def test_sequence_that_left_may_come_back_under_another_key() -> None:
    heap = heap_of((1, 1), (2, 2))
    heap.discard(1)
    heap.push(3, make_sequence(1, 1))
    assert drain(heap) == [2, 1]


def test_sequence_that_left_may_come_back_under_the_same_key() -> None:
    heap = heap_of((1, 1), (2, 2))
    heap.discard(1)
    heap.push(1, make_sequence(1, 1))
    assert drain(heap) == [1, 2]


def test_pushing_twice_is_refused() -> None:
    heap = heap_of((1, 4))
    with pytest.raises(RuntimeError, match="sequence 4 is queued twice"):
        heap.push(2, make_sequence(4, 4))


def test_tokens_inside_are_counted() -> None:
    heap = heap_of((1, 10), (2, 20))
    heap.discard(10)
    assert heap.num_tokens == 20


def test_tokens_that_came_while_inside_do_not_unbalance_the_count() -> None:
    heap: LazyHeap[int] = LazyHeap()
    seq = make_sequence(1, 10)
    heap.push(1, seq)
    seq.token_ids.append(5)
    heap.discard(1)
    assert heap.num_tokens == 0


def test_dead_entries_are_swept_when_they_prevail() -> None:
    heap = heap_of(*((id, id) for id in range(1, 501)))
    for id in range(2, 501):
        heap.discard(id)
    assert len(heap._heap) <= 2 * len(heap) + 64
    assert drain(heap) == [1]
