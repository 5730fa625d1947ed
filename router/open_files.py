"""How many files and connections this process may have."""

import logging
import resource

logger = logging.getLogger(__name__)

SPARE = 64
"""Files of libraries, logs and what a service needs to run at all."""
SPARE_SHARE = 8
"""The n-th part of all, if that is more: a router's connections to its workers are among them."""


def allow_open_files() -> int:
    """As many as the system lets it: the soft limit is often 1,024, which is fewer connections than a service has.
    Returns how many those are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable_connections(wanted: int, num_ports: int, num_files: int) -> int:
    """Of the connections `wanted` at each port, so many as the open files hold. A service that ran out of these could
    take up no connection and open none to others, and would do nothing but say so."""
    if num_files == resource.RLIM_INFINITY:
        return wanted
    held = max(1, (num_files - max(SPARE, num_files // SPARE_SHARE)) // num_ports)
    if held < wanted:
        logger.warning(
            "open files are limited to %d (ulimit -Hn): a port takes %d connections, not %d", num_files, held, wanted
        )
    return min(wanted, held)
