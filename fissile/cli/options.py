"""Options that several commands share."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

if TYPE_CHECKING:
    from fissile.errors import UnreachableError
    from fissile.options import Options
    from fissile.tls import ClientTls

EXIT_INTERRUPTED = 130

F = TypeVar("F", bound=Callable[..., Any])


def _apply(decorators: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


@dataclass(frozen=True, slots=True)
class Target:
    """Which router to talk to, and how."""

    address: str
    """One, or several separated by commas."""
    tls: "ClientTls | None"
    api_key: str


def _tls_file(name: str, what: str) -> Callable[[F], F]:
    envvar = f"FISSILE_{name.upper().replace('-', '_')}"
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option(f"--{name}", type=path, envvar=envvar, show_envvar=True, help=f"{what} (PEM); implies --tls.")


_connection_flags = _apply(
    [
        click.option(
            "-a",
            "--address",
            "addresses",
            multiple=True,
            default=("localhost:50051",),
            show_default=True,
            envvar="FISSILE_ADDRESS",
            show_envvar=True,
            help="Router: HOST, or HOST:PORT. Several, by commas or flags: the next is asked when one is missing.",
        ),
        click.option("--tls/--no-tls", default=None, envvar="FISSILE_TLS", show_envvar=True, help="Connect with TLS."),
        _tls_file("tls-ca", "CA certificate to trust, in place of the system's"),
        _tls_file("tls-certificate", "Certificate to show to a router that wants one"),
        _tls_file("tls-key", "Its key"),
        click.option(
            "--api-key",
            default="",
            envvar="FISSILE_API_KEY",
            show_envvar=True,
            help="What a router with --api-key wants to see. Better in the environment: flags can be seen by others.",
        ),
    ]
)


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags that say which router to talk to, and how; `command` gets them as one `Target` called `to`."""

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
            raise click.ClickException(_not_reached(address, error)) from None

    return _connection_flags(with_target)


def _not_reached(address: str, error: "UnreachableError") -> str:
    from fissile.errors import NOT_REACHABLE, NOTHING_LISTENS

    if error.cause == NOTHING_LISTENS:
        return f"no router at {address}. Start one with `fissile up`, or name another with --address."
    return f"no router at {address}: {error.message if error.cause == NOT_REACHABLE else error.cause}"


def _client_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> "ClientTls":
    from fissile.tls import ClientTls

    return ClientTls(ca, certificate, key)


sampling_options = _apply(
    [
        click.option("-m", "--model", default="", help="Model id. Not needed while the router serves one model."),
        click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Most tokens."),
        click.option("-t", "--temperature", type=float, help="0 is greedy. Default: the model's."),
        click.option("--top-k", type=int, help="Sample from the k most likely tokens only."),
        click.option("--top-p", type=float, help="Sample from the most likely tokens that sum to this probability."),
        click.option("--min-p", type=float, help="Drop tokens less likely than this share of the most likely one."),
        click.option("--seed", type=click.IntRange(min=0, max=2**64 - 1), help="Same seed, same answer."),
        click.option(
            "--repetition-penalty", type=float, help="Above 1: what was in prompt or answer gets less likely."
        ),
        click.option("--presence-penalty", type=float, help="Above 0: what was in the answer gets less likely."),
        click.option("--frequency-penalty", type=float, help="The same, the more often the less likely."),
        click.option("--bad-word", "bad_words", multiple=True, help="Never say this. May be repeated."),
        click.option("--stop", multiple=True, help="End at this text. May be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Go on past the model's end of text."),
        click.option(
            "--json-schema", type=click.File(encoding="utf-8"), help="Answer in JSON that this schema allows."
        ),
        click.option("--regex", help="Answer with a text that this matches."),
        click.option("--choice", multiple=True, help="Answer with this, or another --choice. May be repeated."),
        click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds before giving up."),
    ]
)


def request_options(json_schema: TextIO | None, **given: Any) -> "Options":
    """What of `sampling_options` goes into a request; what is not given is left to the model's defaults."""
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None and value != ()}
    if json_schema is not None:
        try:
            options["json_schema"] = json_schema.read()
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"is no valid UTF-8 at byte {error.start}", param_hint="--json-schema") from None
    if len(options.keys() & {"json_schema", "regex", "choice"}) > 1:
        raise click.UsageError("--json-schema, --regex and --choice exclude each other")
    return cast("Options", options)


def valid_text(text: str) -> str:
    """Refuses bytes that are no UTF-8 (Python carries them as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.ClickException(f"the prompt is no valid UTF-8 at character {error.start}") from None
    return text
