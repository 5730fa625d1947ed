"""`fissile up`: a router and workers on this machine."""

import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from fissile.cli.options import EXIT_INTERRUPTED, FiniteRange, worker_model_option

if TYPE_CHECKING:
    from fissile.cli.cluster import Cluster


class _Up(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            said = f"{error.format_message()} What is meant for the workers goes after `--`."
            raise click.UsageError(said, ctx) from None


@click.command(cls=_Up, short_help="Start a router and workers on this machine.")
@click.option("-w", "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="How many workers.")
@worker_model_option
@click.option(
    "-p",
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=50051,
    show_default=True,
    envvar="FISSILE_ROUTER_PORT",
    show_envvar=True,
    help="Port of the router; 0 takes a free one. Workers take free ones.",
)
@click.option(
    "--http-port",
    type=click.IntRange(min=0, max=65535),
    envvar="FISSILE_ROUTER_HTTP_PORT",
    show_envvar=True,
    help="Port of the router's OpenAI-compatible HTTP front; 0 takes a free one. Default: no front.",
)
@click.option(
    "--api-key",
    default="",
    envvar="FISSILE_API_KEY",
    show_envvar=True,
    help="What clients must show to the router. Better in the environment: flags can be seen by others.",
)
@click.option(
    "--start-timeout",
    type=FiniteRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds until all must be ready.",
)
@click.option(
    "--drain-timeout",
    type=FiniteRange(min=0),
    default=30.0,
    show_default=True,
    envvar="FISSILE_ROUTER_DRAIN_TIMEOUT",
    show_envvar=True,
    help="Seconds that open requests have to finish at the end.",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not print the services' logs.")
@click.argument("worker_arguments", nargs=-1, type=click.UNPROCESSED)
def up(
    workers: int,
    model: str,
    port: int,
    http_port: int | None,
    api_key: str,
    start_timeout: float,
    drain_timeout: float,
    quiet: bool,
    worker_arguments: tuple[str, ...],
) -> None:
    """Start a router and workers on this machine, as processes of their own.

    Ctrl-C stops all of them, once open requests have finished; a second Ctrl-C at once.

    \b
    What follows `--` goes to each worker:
    fissile up --workers 2 -- --max-model-len 2048

    All else of both services can be set in the environment, FISSILE_ROUTER_... and FISSILE_WORKER_...; see `fissile
    router --help` and `fissile worker --help`. The router's workers are always those that are started here.
    """
    from fissile.cli.cluster import ClusterConfig, StartError, running_cluster

    _check_worker_arguments(worker_arguments)
    config = ClusterConfig(workers, port, model, worker_arguments, http_port, start_timeout, drain_timeout, api_key)
    _heed_signals()
    try:
        with running_cluster(config, log_nothing if quiet else log_line) as cluster:
            _print_addresses(cluster)
            sys.exit(_watch(cluster, drain_timeout))
    except StartError as error:
        # Without --quiet, the log that explains it stands right above.
        raise error if quiet else click.ClickException(error.complaint) from error
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        sys.exit(EXIT_INTERRUPTED)


_OF_THE_ENVIRONMENT = ("--host", "--tls-certificate", "--tls-key", "--tls-client-ca")
"""Flags of a worker that say how it is reached: who starts it must know, too."""


def _check_worker_arguments(arguments: tuple[str, ...]) -> None:
    """Raises click.UsageError for what would have this command wait for a worker where there is none."""
    for flag in (argument.partition("=")[0] for argument in arguments):
        if flag in _OF_THE_ENVIRONMENT:
            variable = f"FISSILE_WORKER_{flag[2:].replace('-', '_').upper()}"
            raise click.UsageError(f"{flag}: said by {variable} in the environment, so that the router knows it, too")
        if flag == "--port-file":
            raise click.UsageError(f"{flag}: `fissile up` has one of its own for each worker")


def _heed_signals() -> None:
    """Being told to end, and the end of the terminal unless somebody said that it does not matter (`nohup`), are as
    Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


_printing = threading.Lock()


def log_line(name: str, line: str) -> None:
    with _printing, suppress(OSError):  # who reads may have gone; a service whose lines nobody took would stand still
        click.echo(f"{click.style(f'{name:>9}', fg='cyan')} | {line}", err=True)


def log_nothing(_name: str, _line: str) -> None:
    """The log of a quiet run; what went wrong is still reported."""


def _print_addresses(cluster: "Cluster") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("service", "address", "pid")
    table.add_row("router", cluster.router_address, str(cluster.router.pid))
    if cluster.http_address:
        table.add_row("HTTP", f"{cluster.http_address}/v1", str(cluster.router.pid))
    for child, address in cluster.workers.items():
        table.add_row(child.name, address, str(child.pid))
    Console().print(table)
    click.echo(f"Ready. Try: fissile chat --address {cluster.router_address}   (Ctrl-C here stops all)")


def _watch(cluster: "Cluster", drain_timeout: float) -> int:
    """Report children that end; returns when nothing useful is left, or at an interrupt."""
    left = set(cluster.workers)
    try:
        while left:
            ended = cluster.children.wait_for_exit()
            assert ended is not None
            click.echo(f"{ended.name} ended with code {ended.exit_code}", err=True)
            if ended is cluster.router:
                return 1
            left.discard(ended)
    except KeyboardInterrupt:
        click.echo(f"stopping; open requests have {drain_timeout:g} s to finish, Ctrl-C again stops at once", err=True)
        return 0
    click.echo("no worker is left", err=True)
    return 1
