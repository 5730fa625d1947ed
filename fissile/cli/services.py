"""`fissile router` and `fissile worker`: run one service in place of this process.

The services are started by name (see `fissile.service`), never imported: this package must work without them.
"""

import importlib.util
import os

import click

from fissile import service

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def service_command(name: str, arguments: list[str]) -> list[str]:
    """The command line of a service. Raises ClickException if it, or what it needs, is not installed."""
    if not service.is_installed(name):
        raise click.ClickException(f"there is no {name} in this installation")
    if name == "worker" and importlib.util.find_spec("torch") is None:
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


def _execute(name: str, arguments: tuple[str, ...]) -> None:
    command = service_command(name, list(arguments))
    os.execv(command[0], command)
