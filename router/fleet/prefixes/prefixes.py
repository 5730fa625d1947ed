"""What of a prompt is cached where, as far as this router knows: by workers' events, or by what it has sent them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.fleet.load import LoadTracker
from router.fleet.prefixes.index import PrefixIndex, View
from router.fleet.session import Session

DEFAULT_BLOCK_SIZE = 16
"""Where a worker does not say."""


class Prompt(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...

    def block_hashes(self, block_size: int, num_blocks: int) -> Iterator[int]: ...


class Holder(Protocol):
    """A worker that may have something cached."""

    @property
    def session(self) -> Session: ...

    @property
    def load(self) -> LoadTracker: ...


@dataclass(frozen=True, slots=True)
class _Known:
    """Of one worker."""

    view: View
    block_size: int
    is_history: bool
    """The view is what this router has sent, not what the worker tells."""


class Prefixes:
    """By session: what is known of a worker is never taken for its successor at the same address.

    Models need no names here. Workers of two models may have the same hash for a block, but each has a view of its own.
    """

    def __init__(self, max_bytes: int) -> None:
        self.index = PrefixIndex(max_bytes)
        self._known: dict[Session, _Known] = {}

    @property
    def sessions(self) -> Iterable[Session]:
        """Of which there are views."""
        return self._known.keys()

    def follow(self, session: Session, block_size: int) -> View:
        """A view for whoever gets the worker's events; `forget` closes it."""
        view = self.index.open(session)
        self._known[session] = _Known(view, block_size, is_history=False)
        return view

    def keep_history(self, session: Session, block_size: int, num_blocks: int) -> None:
        """Take it that the worker keeps what it was sent last, as far as that fits into `num_blocks`; 0: not known."""
        view = self.index.open(session, num_blocks or None)
        self._known[session] = _Known(view, block_size or DEFAULT_BLOCK_SIZE, is_history=True)

    def forget(self, session: Session) -> None:
        if known := self._known.pop(session, None):
            known.view.close()

    def cached_tokens(self, prompt: Prompt, candidates: Iterable[Holder]) -> dict[Session, int]:
        """Of the prompt, by worker; those that have nothing are left out. The last token is always computed."""
        found: dict[Session, int] = {}
        for block_size in {c.load.block_size or DEFAULT_BLOCK_SIZE for c in candidates}:
            num_usable = max(0, len(prompt.token_ids) - 1) // block_size
            matches = self.index.match(prompt.block_hashes(block_size, num_usable))
            found |= {session: num_blocks * block_size for session, num_blocks in matches.items()}
        return found

    def sent(self, prompt: Prompt, session: Session, num_cached_tokens: int) -> None:
        """The prompt goes to this worker, which has so much of it."""
        known = self._known.get(session)
        if known and known.is_history:
            known.view.use(list(prompt.block_hashes(known.block_size, len(prompt.token_ids) // known.block_size)))
        elif known and num_cached_tokens:
            known.view.use(list(prompt.block_hashes(known.block_size, num_cached_tokens // known.block_size)))
