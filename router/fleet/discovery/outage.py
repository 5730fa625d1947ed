"""Says what is wrong with a source once, not at each look, and when it is over."""

import logging

from router.targets import Target

logger = logging.getLogger(__name__)


class Outage:
    """Of one source."""

    def __init__(self, target: Target, *, may_come_late: bool) -> None:
        """`may_come_late`: that it is not there at first is nothing to warn of; it may come with the first worker."""
        self._target = target
        self._may_come_late = may_come_late
        self._reason = ""
        self._has_worked = False

    def goes_on(self, reason: str) -> None:
        """The source cannot be asked, or what it says cannot be used."""
        if reason != self._reason:
            self._reason = reason
            is_expected = self._may_come_late and not self._has_worked
            kept = "; its workers stay" if self._has_worked else ""
            logger.log(
                logging.INFO if is_expected else logging.WARNING, "workers at %s: %s%s", self._target, reason, kept
            )

    def is_over(self) -> None:
        """It was asked, and answered. Idempotent."""
        if self._reason:
            logger.info("workers at %s: found", self._target)
        self._reason, self._has_worked = "", True
