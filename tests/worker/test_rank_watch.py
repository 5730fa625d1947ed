"""When a rank stands still: by what was heard of it, and what the system says of its process."""

from worker.executor.watch import SILENT_BEATS, STOPPED_BEATS, RankWatch


class Rank:
    def __init__(self):
        self.num_heard, self.is_stopped = 0, False
        self.reasons = []

    def give_up(self, reason):
        self.reasons.append(reason)


def watch(*ranks, beats):
    watching = RankWatch(ranks)
    for _ in range(beats):
        for rank in ranks[1:]:
            rank.num_heard += 1
        watching.beat()


def test_one_that_the_system_has_stopped_is_given_up_soon():
    still, other = Rank(), Rank()
    still.is_stopped = True
    watch(still, other, beats=STOPPED_BEATS - 1)
    assert still.reasons == []
    watch(still, other, beats=STOPPED_BEATS)
    assert (still.reasons, other.reasons) == (["stood still: nothing was heard of it for 2 s"], [])


def test_one_that_is_only_silent_gets_more_time():
    """Something may hold the interpreter's lock."""
    silent = Rank()
    watch(silent, beats=SILENT_BEATS - 1)
    assert silent.reasons == []
    watch(silent, beats=SILENT_BEATS)
    assert silent.reasons == ["stood still: nothing was heard of it for 10 s"]


def test_a_word_clears_it():
    rank = Rank()
    rank.is_stopped = True
    watching = RankWatch([rank])
    for beat in range(20 * STOPPED_BEATS):
        rank.num_heard += beat % STOPPED_BEATS == 0
        watching.beat()
    assert rank.reasons == []
