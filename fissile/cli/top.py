"""`fissile top`: a router and its workers, live."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from fissile.cli.connection import Target, connection_options
from fissile.cli.options import FiniteRange

if TYPE_CHECKING:
    from rich.live import Live

    from fissile import Client
    from fissile.cli.dashboard import History

_TIMEOUT = 2.0
_QUIT_KEYS = frozenset(b"qQ")


@click.command()
@click.option(
    "--interval", type=FiniteRange(min=0.1), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option(
    "--window",
    type=click.IntRange(min=1, max=3600),
    default=60,
    show_default=True,
    help="Latencies, rates and hits are of the last so many seconds.",
)
@click.option("--once", is_flag=True, help="Look twice, print once and end; so it is where nobody watches a terminal.")
@connection_options
def top(interval: float, window: int, once: bool, to: Target) -> None:
    """Watch a router and its workers; q ends it."""
    from rich.console import Console

    from fissile import Client
    from fissile.cli.dashboard import Dashboard, History

    console = Console()
    history = History(window)
    with Client(to.address, tls=to.tls, api_key=to.api_key) as client:
        _look(client, history, window)  # a first one that fails ends it: most likely the address is wrong
        if once or not console.is_terminal:
            time.sleep(interval)
            _look(client, history, window)
            console.print(Dashboard(to.address, history))
            return
        from rich.live import Live

        # Keys first: what is pressed at the sight of the first frame must count.
        with _keys() as wait_for_quit, Live(console=console, screen=True, auto_refresh=False) as live:
            _watch(live, client, history, to.address, interval, window, wait_for_quit)


def _look(client: "Client", history: "History", window: int) -> None:
    from fissile.cli.dashboard import Sample

    stats = client.stats(window=window, timeout=_TIMEOUT)
    history.add(Sample(time.monotonic(), stats))


def _watch(
    live: "Live",
    client: "Client",
    history: "History",
    address: str,
    interval: float,
    window: int,
    wait_for_quit: Callable[[float], bool],
) -> None:
    """Until a key or Ctrl-C ends it. A router that does not answer is asked again: it may be restarting."""
    from fissile.cli.dashboard import Dashboard
    from fissile.errors import FissileError

    problem = ""
    with suppress(KeyboardInterrupt):
        while True:
            live.update(Dashboard(address, history, problem), refresh=True)
            if wait_for_quit(interval):
                return
            try:
                _look(client, history, window)
                problem = ""
            except FissileError as error:
                problem = f"{address} does not answer: {error.message}"


class _Keyboard:
    """Keys as they are pressed. Without a terminal there are none."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float) -> bool:
        """Wait so long; True at once when a key that ends it is pressed."""
        import select

        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._descriptor is None:
                time.sleep(left)
            elif select.select([self._descriptor], [], [], left)[0]:
                keys = os.read(self._descriptor, 64)
                if not keys or _QUIT_KEYS & set(keys):
                    return True
        return False


@contextmanager
def _keys() -> Iterator[_Keyboard]:
    """While it lasts, keys are neither shown nor collected into lines. Ctrl-C is a KeyboardInterrupt as ever."""
    if not sys.stdin.isatty():
        yield _Keyboard(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
