"""Options that say which service to talk to, and how: commands get them as one `Target` called `to`."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fissile.cli.options import F, apply

if TYPE_CHECKING:
    from fissile.errors import UnreachableError
    from fissile.tls import ClientTls

_KEY_ADVICE = "Better in the environment: flags can be seen by others."


@dataclass(frozen=True, slots=True)
class Target:
    """Which service to talk to, and how."""

    address: str
    """One, or several routers separated by commas."""
    tls: "ClientTls | None"
    api_key: str


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Of a command that asks a router."""
    addresses = click.option(
        "-a",
        "--address",
        "addresses",
        multiple=True,
        default=("localhost:50051",),
        show_default=True,
        envvar="FISSILE_ADDRESS",
        show_envvar=True,
        help="Router: HOST, or HOST:PORT. Several, by commas or flags: the next is asked when one is missing.",
    )
    api_key = click.option(
        "--api-key",
        default="",
        envvar="FISSILE_API_KEY",
        show_envvar=True,
        help=f"What a router with --api-key wants to see. {_KEY_ADVICE}",
    )
    flags = apply([addresses, *_tls_flags("FISSILE", "router"), api_key])
    start = "Start one with `fissile up`, or name another with --address."
    return flags(_with_target(command, "router", start))


def operator_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Of a command that asks a worker, as its operator."""
    address = click.argument("addresses", metavar="WORKER", nargs=1, callback=lambda _, __, value: (value,))
    api_key = click.option(
        "--operator-key",
        "api_key",
        default="",
        envvar="FISSILE_OPERATOR_KEY",
        show_envvar=True,
        help=f"What a worker with --operator-key wants to see. {_KEY_ADVICE}",
    )
    flags = apply([address, *_tls_flags("FISSILE_OPERATOR", "worker"), api_key])
    return flags(_with_target(command, "worker", "WORKER is its HOST:PORT."))


def _tls_flags(prefix: str, server: str) -> list[Callable[[F], F]]:
    def file(name: str, what: str) -> Callable[[F], F]:
        envvar = f"{prefix}_{name.upper().replace('-', '_')}"
        path = click.Path(exists=True, dir_okay=False, path_type=Path)
        return click.option(
            f"--{name}", type=path, envvar=envvar, show_envvar=True, help=f"{what} (PEM); implies --tls."
        )

    return [
        click.option(
            "--tls/--no-tls", default=None, envvar=f"{prefix}_TLS", show_envvar=True, help="Connect with TLS."
        ),
        file("tls-ca", "CA certificate to trust, in place of the system's"),
        file("tls-certificate", f"Certificate to show to a {server} that wants one"),
        file("tls-key", "Its key"),
    ]


def _with_target(command: Callable[..., Any], server: str, advice: str) -> Callable[..., Any]:
    """`advice`: for when nothing listens at the address."""

    @functools.wraps(command)
    def with_target(
        *,
        addresses: tuple[str, ...],
        tls: bool | None,
        tls_ca: Path | None,
        tls_certificate: Path | None,
        tls_key: Path | None,
        api_key: str,
        **others: Any,
    ) -> Any:
        address = ",".join(addresses)
        if tls is None:
            tls = bool(tls_ca or tls_certificate or tls_key)
        if (tls_certificate is None) != (tls_key is None):
            raise click.UsageError("--tls-certificate and --tls-key go together")
        # Before grpc is imported: what it would say on standard error is in the errors that it raises.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        client_tls = _client_tls(tls_ca, tls_certificate, tls_key) if tls else None
        from fissile.errors import UnreachableError

        try:
            return command(to=Target(address, client_tls, api_key), **others)
        except UnreachableError as error:
            raise click.ClickException(f"no {server} at {address}{_why(error, advice)}") from None

    return with_target


def _why(error: "UnreachableError", advice: str) -> str:
    from fissile.errors import NOT_REACHABLE, NOTHING_LISTENS

    if error.cause == NOTHING_LISTENS:
        return f". {advice}"
    return f": {error.message if error.cause == NOT_REACHABLE else error.cause}"


def _client_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> "ClientTls":
    from fissile.tls import ClientTls

    return ClientTls(ca, certificate, key)
