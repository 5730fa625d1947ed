"""Who gets a request, and what counts as load."""

from dataclasses import dataclass, field

from fissile.v1 import WorkerLoad
from router.fleet.load import LoadTracker
from router.fleet.policy import LeastLoaded, RoundRobin


@dataclass
class Worker:
    address: str
    load: LoadTracker = field(default_factory=LoadTracker)


def workers(*open_counts):
    result = [Worker(name) for name, _ in zip("abcdefgh", open_counts, strict=False)]
    for worker, count in zip(result, open_counts, strict=True):
        for _ in range(count):
            worker.load.opened()
    return result


def chosen(policy, candidates, times):
    return "".join(policy.choose(candidates).address for _ in range(times))


def test_round_robin_takes_turns():
    assert chosen(RoundRobin(), workers(0, 5, 0), 7) == "abcabca"


def test_round_robin_goes_on_in_order_when_workers_come_and_go():
    policy = RoundRobin()
    a, b, c = workers(0, 0, 0)
    assert chosen(policy, [a, b, c], 2) == "ab"
    assert chosen(policy, [a, c], 2) == "ca"
    assert chosen(policy, [c, b, a], 2) == "bc"


def test_least_loaded_takes_the_fewest():
    assert chosen(LeastLoaded(), workers(3, 1, 2), 3) == "bbb"


def test_least_loaded_equals_take_turns():
    assert chosen(LeastLoaded(), workers(1, 1, 4), 4) == "abab"


def test_counting_before_sending_spreads_a_burst():
    policy = LeastLoaded()
    candidates = workers(0, 0, 0, 0)
    for _ in range(100):
        policy.choose(candidates).load.opened()
    assert [w.load.num_sequences for w in candidates] == [25] * 4


def test_load_that_others_put_on_a_worker_counts():
    (worker,) = workers(2)
    worker.load.reported(WorkerLoad(num_running=5, num_waiting=2, num_swapped=1))
    assert worker.load.num_sequences == 8
    worker.load.closed()
    assert worker.load.num_sequences == 7
    worker.load.opened()
    worker.load.opened()
    assert worker.load.num_sequences == 9


def test_a_report_older_than_what_was_just_sent_takes_nothing_off():
    (worker,) = workers(3)
    worker.load.reported(WorkerLoad(num_running=1))
    assert worker.load.num_sequences == 3


def test_reset_forgets_everything():
    (worker,) = workers(3)
    worker.load.reported(WorkerLoad(num_running=9))
    worker.load.reset()
    assert (worker.load.num_sequences, worker.load.last_report) == (0, None)
