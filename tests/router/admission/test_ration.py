"""What is done in one turn of the event loop is bounded, and nothing is lost or overtaken for it."""

import asyncio

from router.admission.ration import TURNS_OF_CALL, UNITS_BESIDE_CALLS, UNITS_PER_TURN, Ration

ROOM = int(UNITS_PER_TURN)


def run(scenario):
    """Each thing that is done adds its name to a list; returns the lists of all turns."""

    async def main():
        ration, turns = Ration(), [[]]

        def begin_turn():
            turns.append([])
            if len(turns) < 50:
                asyncio.get_running_loop().call_soon(begin_turn)

        begin_turn()
        scenario(ration, lambda name: turns[-1].append(name))
        while len(turns) < 50:
            await asyncio.sleep(0)
        return [turn for turn in turns if turn], ration

    done, ration = asyncio.run(main())
    assert not ration._is_coming_back, "an idle loop is left alone"
    return done


def test_what_there_is_room_for_is_done_at_once_and_the_rest_in_the_next_turns():
    def scenario(ration, do):
        for number in range(2 * ROOM + 1):
            ration.wake("client", lambda number=number: do(number))

    assert run(scenario) == [[*range(ROOM)], [*range(ROOM, 2 * ROOM)], [2 * ROOM]]


def test_what_is_urgent_goes_before_what_waits():
    def scenario(ration, do):
        for number in range(ROOM + 2):
            ration.wake("client", lambda number=number: do(number))
        ration.wake("client", lambda: do("urgent"), is_urgent=True)

    assert run(scenario) == [[*range(ROOM)], ["urgent", ROOM, ROOM + 1]]


def test_a_flood_of_what_is_urgent_leaves_the_rest_its_share():
    def scenario(ration, do):
        for number in range(ROOM + 2):
            ration.wake("client", lambda number=number: do(number))
        for _ in range(2 * ROOM):
            ration.wake("client", lambda: do("urgent"), is_urgent=True)

    first, second, *_ = run(scenario)
    assert (first, second) == ([*range(ROOM)], ["urgent", ROOM, "urgent", ROOM + 1])


def test_what_costs_more_than_a_turn_has_is_paid_by_the_next_ones():
    def scenario(ration, do):
        ration.wake("client", lambda: do("large"), 3 * UNITS_PER_TURN)
        ration.wake("client", lambda: do("small"))

    assert run(scenario) == [["large"], ["small"]]


def test_who_waits_to_be_granted_may_go_away():
    async def main():
        ration, order = Ration(), []

        async def work(name):
            await ration.granted(name, UNITS_PER_TURN)
            order.append(name)

        tasks = [asyncio.create_task(work(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(main()) == ["a", "c"]


def test_a_client_with_little_goes_before_the_rest_of_one_with_much():
    def scenario(ration, do):
        for number in range(5 * ROOM):
            ration.wake("flood", lambda number=number: do(number), is_urgent=True)
        ration.wake("other", lambda: do("other"), is_urgent=True)

    first, second, *_ = run(scenario)
    assert first == [*range(ROOM)]
    assert "other" in second


def test_messages_get_shorter_turns_while_calls_are_taken_up():
    few = int(UNITS_BESIDE_CALLS)

    def scenario(ration, do):
        ration.call_came()
        for number in range(4 * ROOM + TURNS_OF_CALL * few):
            ration.wake("client", lambda number=number: do(number))

    first, *rest = run(scenario)
    assert first == [*range(ROOM)]
    assert [len(turn) for turn in rest] == [few] * (TURNS_OF_CALL - 1) + [ROOM] * 3 + [few]


def test_calls_without_messages_beside_them_have_whole_turns():
    def scenario(ration, do):
        ration.call_came()
        for number in range(2 * ROOM):
            ration.wake("client", lambda number=number: do(number), is_urgent=True)

    assert [len(turn) for turn in run(scenario)] == [ROOM, ROOM]
