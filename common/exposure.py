"""What is said at start of a port that others than this machine can reach."""

import ipaddress
import logging

logger = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def warn_if_exposed(what: str, host: str, *, has_tls: bool, open_to_all: str = "") -> None:
    """`open_to_all`: what anyone may do who reaches it; empty: callers must show who they are."""
    if is_loopback(host):
        return
    if open_to_all:
        logger.warning("%s on %s asks nobody who they are: anyone who reaches it may %s", what, host, open_to_all)
    if not has_tls:
        logger.warning("%s on %s has no TLS: what it says and hears can be read and changed on the way", what, host)
