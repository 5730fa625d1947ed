"""How many files and connections this process may have."""

import resource


def allow_open_files() -> None:
    """As many as the system lets it: the soft limit is often 1,024, which is fewer connections than a service has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
