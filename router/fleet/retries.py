"""How often a request may be tried again, and when it is suspected of what its workers died of.

A worker that refuses a request, drains or is slow says nothing about the request: it is tried elsewhere, `max_retries`
times in a row. A worker that died while it had the request may have died of it; workers that step together end
together, so all of a group are one death:

- Two deaths without a token in between end it: it is not carried to a third worker. `quarantine.py` sees to it that
  others do not share its fate.
- Tokens in between clear it, and it may be tried again as often as at first. But some requests fail late, so in all it
  may see MAX_DEATHS deaths, and one more for each TOKENS_PER_DEATH tokens.

All requests together have a budget for second moves (`retry_budget.py`).
"""

from dataclasses import dataclass, field

from fissile.errors import InternalError, UnavailableError
from router.answering.hop import Loss
from router.fleet.retry_budget import RetryBudget
from router.fleet.session import Session

MAX_DEATHS_WITHOUT_PROGRESS = 2
MAX_DEATHS = 4
TOKENS_PER_DEATH = 256


@dataclass(slots=True)
class Retries:
    """Of one request."""

    max_retries: int
    budget: RetryBudget
    """Of all requests."""
    failed: set[Session] = field(default_factory=set)
    """Where it was lost since its last token: it goes there no more."""
    _num_tokens: int = 0
    """That it had at the last loss."""
    _num_deaths: int = 0
    _num_deaths_in_a_row: int = 0
    _dead_groups: set[str] = field(default_factory=set)
    """Of workers that step together."""

    @property
    def is_suspect(self) -> bool:
        """A worker died while it had the request, and no token has cleared it since."""
        return self._num_deaths_in_a_row > 0

    def count(self, session: Session, loss: Loss, num_tokens: int) -> None:
        """Raises the error that ends the request if it was tried often enough. `num_tokens`: of all completions."""
        if num_tokens > self._num_tokens:
            self.failed.clear()
            self._num_deaths_in_a_row = 0
        self._num_tokens = num_tokens
        self.failed.add(session)
        if loss.worker_died and self._is_another_death(session.lockstep_group):
            self._num_deaths += 1
            self._num_deaths_in_a_row += 1
            self._check_deaths(loss)
        if len(self.failed) > self.max_retries:
            raise loss.refusal or UnavailableError(f"gave up after {len(self.failed)} workers: {loss.detail}")
        if len(self.failed) > 1 and not self.budget.spend():
            detail = f"gave up after {len(self.failed)} workers, as too many requests are tried again: {loss.detail}"
            raise loss.refusal or UnavailableError(detail, retry_after=1.0)

    def _is_another_death(self, group: str) -> bool:
        if group in self._dead_groups:
            return False
        if group:
            self._dead_groups.add(group)
        return True

    def _check_deaths(self, loss: Loss) -> None:
        if self._num_deaths_in_a_row >= MAX_DEATHS_WITHOUT_PROGRESS:
            num_deaths = self._num_deaths_in_a_row
        elif self._num_deaths > MAX_DEATHS + self._num_tokens // TOKENS_PER_DEATH:
            num_deaths = self._num_deaths
        else:
            return
        raise InternalError(f"gave up: {num_deaths} workers died while they had this request; the last: {loss.detail}")
