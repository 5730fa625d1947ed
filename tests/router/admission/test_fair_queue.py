"""Whose turn it is."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_queue import MAX_IDLE, FairQueue
from router.admission.gate import Gate


def pop_all(queue):
    return [queue.pop().item for _ in range(len(queue))]


def test_clients_take_turns_however_much_each_has_waiting():
    queue = FairQueue()
    for number in range(4):
        queue.push("flood", f"f{number}")
    queue.push("other", "o0")
    queue.push("other", "o1")
    assert pop_all(queue) == ["f0", "o0", "f1", "o1", "f2", "f3"]


def test_shares_are_of_cost_not_of_number():
    queue = FairQueue()
    for number in range(3):
        queue.push("large", f"L{number}", cost=10)
        for part in range(4):
            queue.push("small", f"s{number}{part}", cost=2.5)
    assert pop_all(queue) == [
        "L0", "s00", "s01", "s02", "s03", "L1", "s10", "s11", "s12", "s13", "L2", "s20", "s21", "s22", "s23"
    ]  # fmt: skip


def test_a_clients_own_go_by_priority_and_between_clients_it_counts_nothing():
    queue = FairQueue()
    queue.push("a", "a-late", priority=5)
    queue.push("a", "a-urgent", priority=-5)
    queue.push("b", "b")
    queue.push("a", "a-later", priority=5)
    assert pop_all(queue) == ["a-urgent", "b", "a-late", "a-later"]


def test_nobody_saves_up_shares_by_being_idle_or_has_to_make_up_for_them():
    queue = FairQueue()
    for _ in range(100):
        queue.serve("busy", 1)
    for number in range(3):
        queue.push("busy", f"b{number}")
        queue.push("new", f"n{number}")
    assert pop_all(queue) == ["n0", "b0", "n1", "b1", "n2", "b2"]


def test_what_a_thing_really_cost_is_counted_later():
    queue = FairQueue()
    for number in range(4):
        queue.push("a", f"a{number}")
        queue.push("b", f"b{number}")
    assert queue.pop().item == "a0"
    queue.charge("a", 2)
    assert pop_all(queue) == ["b0", "b1", "b2", "a1", "b3", "a2", "a3"]


def test_what_is_removed_is_not_served_and_the_last_can_be_found():
    queue = FairQueue()
    first, last = queue.push("a", 1, priority=1), queue.push("a", 2, priority=7)
    queue.push("a", 3, priority=1)
    assert queue.last_of("a") is last
    assert (queue.remove(first), queue.remove(first), queue.waiting_of("a"), queue.lengths()) == (
        True, False, 2, {"a": 2}
    )  # fmt: skip
    assert pop_all(queue) == [3, 2]
    assert queue.waiting_of("a") == 0


def test_counters_of_clients_that_are_gone_are_forgotten():
    queue = FairQueue()
    for number in range(10 * MAX_IDLE):
        queue.push(f"client {number}", number)
        queue.pop()
    assert len(queue._served) <= MAX_IDLE + 1
    assert not queue._lines


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=60))
def test_while_two_wait_their_shares_differ_by_no_more_than_one_thing(things):
    queue = FairQueue()
    for number, (client, cost) in enumerate(things):
        queue.push(client, number, cost=cost)
    served = dict.fromkeys("abc", 0)
    while queue:
        waiting = list(queue.lengths())
        shares = [served[client] for client in waiting]
        assert max(shares) - min(shares) <= 20
        ticket = queue.pop()
        served[ticket.client] += ticket.cost


def test_a_gate_lets_in_so_many_and_a_flood_waits_in_its_own_line():
    async def scenario():
        gate, order = Gate(2), []

        async def work(name, client):
            async with gate.entered(client, 1):
                order.append(name)
                await asyncio.sleep(0)

        flood = [work(f"f{i}", "flood") for i in range(6)]
        await asyncio.gather(*flood, work("o", "other"))
        return order, gate.num_waiting, gate._num_free

    order, num_waiting, num_free = asyncio.run(scenario())
    assert order.index("o") == 2
    assert (num_waiting, num_free) == (0, 2)


def test_who_is_cancelled_at_a_gate_leaves_its_place_to_the_next():
    async def scenario():
        gate = Gate(1)
        await gate.enter("a", 1)
        waiting = [asyncio.create_task(gate.enter("a", 1)) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        waiting[1].cancel()
        gate.leave()  # lets in the third; then that is cancelled, before it has heard of it
        waiting[2].cancel()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        gate.leave()
        return [type(result).__name__ for result in done], gate._num_free, gate.num_waiting

    ends, num_free, num_waiting = asyncio.run(scenario())
    assert ends == ["CancelledError", "CancelledError", "CancelledError", "NoneType"]
    assert (num_free, num_waiting) == (1, 0)
