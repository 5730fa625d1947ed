"""KV events become a view; what is missing or another's is noticed."""

import pytest

from fissile.v1 import KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvEvent, WatchKvEventsResponse
from router.fleet.prefixes.index import PrefixIndex
from router.fleet.prefixes.kv_feed import KvFeed, KvGapError

CLEARED = KvEvent(cleared=KvCacheCleared())


def stored(*hashes):
    return KvEvent(stored=KvBlocksStored(block_hashes=hashes))


def removed(*hashes):
    return KvEvent(removed=KvBlocksRemoved(block_hashes=hashes))


def message(number, *events, is_snapshot=False, epoch="e"):
    return WatchKvEventsResponse(sequence_number=number, events=events, is_snapshot=is_snapshot, epoch=epoch)


def fed(*messages):
    view = PrefixIndex(1 << 20).open(("a", 1))
    feed = KvFeed(view, "e")
    for one in messages:
        feed.apply(one)
    return feed, {hash for hash in range(10) if hash in view}


SNAPSHOT = message(7, CLEARED, stored(1, 2), is_snapshot=True)


def test_a_snapshot_in_parts_then_changes():
    part = message(7, stored(3), is_snapshot=True)
    assert fed(SNAPSHOT, part)[1] == {1, 2, 3}
    assert fed(SNAPSHOT, part, message(8, stored(4), removed(2)), message(10, removed(9), stored(5)))[1] == {1, 3, 4, 5}


def test_clearing_is_one_event_of_many():
    assert fed(SNAPSHOT, message(8, stored(3), CLEARED, stored(4)))[1] == {4}


def test_a_new_snapshot_replaces_everything():
    assert fed(SNAPSHOT, message(90, CLEARED, stored(5), is_snapshot=True), message(91, stored(6)))[1] == {5, 6}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (message(9, stored(3)), "event 9 after 7"),
        (message(7, stored(3)), "event 7 after 7"),
        (message(8, stored(3), epoch="f"), "events of epoch 'f', not 'e'"),
        (message(8, CLEARED, stored(3), is_snapshot=True, epoch="f"), "events of epoch 'f', not 'e'"),
    ],
    ids=["gap", "repeat", "epoch", "snapshot of another"],
)
def test_what_does_not_follow_is_a_gap(wrong, what):
    feed, _ = fed(SNAPSHOT)
    with pytest.raises(KvGapError) as caught:
        feed.apply(wrong)
    assert str(caught.value) == what


def test_changes_without_a_snapshot_are_a_gap():
    with pytest.raises(KvGapError):
        fed(message(1, stored(3)))


def test_after_a_restart_nothing_is_known_until_the_snapshot():
    feed, _ = fed(SNAPSHOT)
    feed.restart()
    with pytest.raises(KvGapError):
        feed.apply(message(8, stored(3)))
    feed.apply(message(9, CLEARED, stored(3), is_snapshot=True))
