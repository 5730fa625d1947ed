"""How a service is told to stop."""

import asyncio
import os
import signal


def stop_event_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second signal ends the process at once with status 130, without any more
    of it: what it started ends with it. Others may set the event, too: a first signal after that is none of these."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    has_come = False

    def on_signal() -> None:
        nonlocal has_come
        if has_come:
            os._exit(130)
        has_come = True
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return event
