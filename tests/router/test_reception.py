"""A call that gRPC has taken up is known before anything of it is read."""

import asyncio

from router.admission.full_connections import FullConnections
from router.admission.ration import UNITS_BESIDE_CALLS, UNITS_PER_TURN, Ration
from router.admission.turns import Turns
from router.callers.callers import Callers
from router.reception import Reception


class UnreadCall:
    def peer(self):
        return "ipv4:127.0.0.1:1"

    async def read(self):
        await asyncio.Event().wait()


def test_messages_get_shorter_turns_before_the_call_is_read():
    async def main():
        ration, done = Ration(), []
        reception = Reception(Callers("", None), FullConnections(8, lambda: None), Turns(2, ration), ration, 60.0)
        call = asyncio.create_task(reception.take(None, UnreadCall()))
        await asyncio.sleep(0)
        for _ in range(4 * int(UNITS_PER_TURN)):
            ration.wake("client", lambda: done.append(None))
        await asyncio.sleep(0)
        num_before = len(done)
        await asyncio.sleep(0)
        call.cancel()
        return len(done) - num_before

    assert asyncio.run(main()) == UNITS_BESIDE_CALLS
