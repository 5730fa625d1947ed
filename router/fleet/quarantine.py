"""Requests whose worker died before they had a token of it go to the next one by one.

Any of them may be what it died of. If they came all at once and the next worker died, too, there would still be no
telling which, and all would end for the sake of one.
"""

import asyncio
from collections.abc import Callable, Sequence

from router.answering.request import OpenRequest
from router.fleet.link import WorkerLink
from router.fleet.session import Session

MAX_WAIT_SECONDS = 1.0
"""A worker that an operator kills leaves many such requests behind, and hardly ever one to blame. After so long they
come all at once."""
_LOOK_SECONDS = 0.01


class Quarantine:
    """One per router."""

    def __init__(self) -> None:
        self._suspects: dict[Session, OpenRequest] = {}
        """Where each went last."""

    async def turn(self, candidates: Callable[[], Sequence[WorkerLink]]) -> Sequence[WorkerLink]:
        """Those of the candidates on which no suspect waits for its first token; after a bounded wait all of them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MAX_WAIT_SECONDS
        while (links := candidates()) and loop.time() < deadline:
            if free := [link for link in links if self._is_free(link.session)]:
                return free
            await asyncio.sleep(_LOOK_SECONDS)
        return links

    def put_on(self, session: Session, suspect: OpenRequest) -> None:
        """It goes there."""
        self._suspects = {at: request for at, request in self._suspects.items() if request.awaits_first_output}
        self._suspects[session] = suspect

    def _is_free(self, session: Session) -> bool:
        suspect = self._suspects.get(session)
        return suspect is None or not suspect.awaits_first_output
