"""`python -m router`."""

import asyncio
import sys

from common.config import parse_settings, warn_of_unknown_variables
from common.event_loop import EventLoop
from common.garbage import imports_that_stay
from common.logging import flush_logging, setup_logging
from fissile.errors import FissileError
from router.config import RouterSettings

EXIT_FAILURE = 1
SWITCH_SECONDS = 0.001
"""How long a thread that checks or tokenises may keep the interpreter while the event loop waits for it, which it does
after each message. Python's own is five times that."""


def main() -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    settings = parse_settings(RouterSettings, sys.argv[1:], "router")
    setup_logging(settings.log_level, settings.log_format, gathers=True)
    warn_of_unknown_variables(RouterSettings)
    # Libraries take hold of standard error when they are imported; and help needs none of them.
    with imports_that_stay():
        from router.server import serve

    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(serve(settings))
    except (FissileError, OSError) as error:
        flush_logging()
        print(f"router: {error}", file=sys.stderr)
        raise SystemExit(EXIT_FAILURE) from error


if __name__ == "__main__":
    main()
