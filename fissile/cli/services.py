"""`fissile router`, `fissile worker` and `fissile join`: run one service in place of this process.

The services are started by name (see `fissile.service`), never imported: this package must work without them.
"""

import importlib.util
import os

import click

from fissile import service

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def service_command(name: str, arguments: list[str]) -> list[str]:
    """The command line of a service, or of a module of one. Raises ClickException if it, or what it needs, is not
    installed."""
    package = name.partition(".")[0]
    if not service.is_installed(package):
        raise click.ClickException(f"there is no {package} in this installation")
    if package == "worker" and importlib.util.find_spec("torch") is None:
        raise click.ClickException("a worker needs PyTorch: pip install 'fissile[worker]'")
    return service.service_command(name, arguments)


@click.command(short_help="Run a router.", context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def router(arguments: tuple[str, ...]) -> None:
    """Run a router; `fissile router --help` lists its flags."""
    _execute("router", arguments)


@click.command(short_help="Run a worker.", context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run a worker; `fissile worker --help` lists its flags."""
    _execute("worker", arguments)


@click.command(
    short_help="Run a rank for a worker on another host.", context_settings=_PASS_THROUGH, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def join(arguments: tuple[str, ...]) -> None:
    """Run a tensor-parallel rank for a worker on another host; `fissile join --help` lists its flags."""
    _execute("worker.join", arguments)


def _execute(name: str, arguments: tuple[str, ...]) -> None:
    command = service_command(name, list(arguments))
    os.execv(command[0], command)
