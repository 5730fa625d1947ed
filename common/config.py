"""Typed configuration from flags and environment, one declaration for both.

A service declares a subclass of `ServiceSettings`, each field with a description. Flags (`--kebab-case`) and `--help`
are click's, as those of the `fissile` command are; environment variables (`<PREFIX>FIELD`) and validation are
pydantic's. A flag wins over the environment.
"""

import difflib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from common.logging import LogFormat
from fissile.tls import ServerTls

logger = logging.getLogger(__name__)

S = TypeVar("S", bound="Settings")


def _split(value: object) -> object:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        return value
    return tuple(word.strip() for part in parts for word in str(part).split(",") if word.strip())


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of words, as a repeated flag or separated by commas (flag or environment)."""

GrpcPort = Annotated[int, Field(ge=0, le=65535, description="gRPC port; 0 takes a free one.")]

EXIT_USAGE = 2

_OF_KUBERNETES = re.compile(r"SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_.+)?")


def is_sendable(key: str) -> bool:
    """A header can hold it."""
    return key.isascii() and key.isprintable() and " " not in key


_METAVARS: dict[object, str] = {int: "INTEGER", float: "NUMBER", Path: "FILE"}


class Settings(BaseSettings):
    """Base of all settings. Immutable."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,  # of all settings at once, an API key among them
    )


class ServiceSettings(Settings):
    """What every service can be told. In `--help` it comes last."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: GrpcPort
    port_file: Path | None = Field(None, description="Write the bound gRPC port to this file once it is listening.")
    tls_certificate: Path | None = Field(None, description="PEM certificate; turns TLS on, together with --tls-key.")
    tls_key: Path | None = Field(None, description="PEM private key of --tls-certificate.")
    tls_client_ca: Path | None = Field(
        None, description="PEM roots that clients must show a certificate of (mutual TLS)."
    )
    reflection: bool = Field(True, description="Tell everyone who asks what the service's methods are (gRPC).")
    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 takes a free one; unset: no endpoint."
    )
    otlp_traces_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^/\s]+/?)?$",
        description="Collector of OpenTelemetry traces (OTLP over gRPC), as http://host:4317; empty: none. "
        "Needs fissile[tracing].",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")
    log_format: LogFormat = Field("text", description="Lines of text, or of JSON.")

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key")
        return self

    def server_tls(self) -> ServerTls | None:
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_certificate, self.tls_key, self.tls_client_ca)


def parse_settings(cls: type[S], argv: list[str], prog: str) -> S:
    """Settings from `argv` and the environment. Prints one line a fault to standard error and exits 2 on bad values and
    unknown flags; `--help` prints and exits 0."""
    try:
        given = _flags(cls, argv, prog)
        return cls(**given)
    except click.UsageError as error:
        print(f"{prog}: {error.format_message()}", file=sys.stderr)
    except ValidationError as error:
        for fault in error.errors():
            print(f"{prog}: {_described(fault, cls, given)}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def warn_of_unknown_variables(cls: type[Settings]) -> None:
    """Variables with the prefix of a service that are no setting of it: misspelt ones would count for nothing in
    silence. Those that Kubernetes makes of a service's name are nobody's fault."""
    prefix = cls.model_config["env_prefix"]
    known = {variable(cls, name) for name in cls.model_fields}
    for name in sorted(os.environ):
        rest = name.upper().removeprefix(prefix)
        if rest == name.upper() or name.upper() in known or _OF_KUBERNETES.fullmatch(rest):
            continue
        meant = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.85)
        advice = f"; is {meant[0]} meant?" if meant else ""
        logger.warning("the environment variable %s is no setting and counts for nothing%s", name, advice)


def variable(cls: type[Settings], name: str) -> str:
    """The environment variable of a field."""
    return f"{cls.model_config['env_prefix']}{name}".upper()


def _flags(cls: type[Settings], argv: list[str], prog: str) -> dict[str, object]:
    """What `argv` sets, as written. Raises click.UsageError; `--help` ends the process."""
    shared = ServiceSettings.model_fields if issubclass(cls, ServiceSettings) else {}
    fields = sorted(cls.model_fields.items(), key=lambda field: field[0] in shared)
    command = _Command(
        prog,
        params=[_option(cls, name, field) for name, field in fields],
        help=cls.__doc__,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    try:
        with command.make_context(f"fissile {prog}", list(argv)) as context:
            return {
                name: value
                for name, value in context.params.items()
                if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
            }
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None


class _Command(click.Command):
    """Help with each flag on a line of its own: names of variables are long, and must not be broken."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None], col_max=4)


def _option(cls: type[Settings], name: str, field: FieldInfo) -> click.Option:
    """A flag that only carries text: pydantic reads it, and the environment."""
    flag = f"--{name.replace('_', '-')}"
    has_default = not field.is_required() and not isinstance(field.default, SecretStr)
    default = field.default if has_default else None
    is_bool = field.annotation is bool
    return click.Option(
        [f"{flag}/--no-{flag[2:]}" if is_bool else flag],
        type=bool if is_bool else str,
        metavar=None if is_bool else _metavar(field),
        multiple=isinstance(field.default, tuple),
        default=default,
        show_default=default not in (None, "", ()),
        envvar=variable(cls, name),
        show_envvar=True,
        help=f"{field.description} Needed." if field.is_required() else field.description,
    )


def _metavar(field: FieldInfo) -> str:
    """What a value looks like; of `T | None`, a T."""
    is_union = type(None) in get_args(field.annotation)
    kind = get_args(field.annotation)[0] if is_union else field.annotation
    if get_origin(kind) is Literal:
        return f"[{'|'.join(map(str, get_args(kind)))}]"
    if isinstance(field.default, tuple):
        return "TEXT,..."
    return _METAVARS.get(kind, "TEXT")


def _described(fault: ErrorDetails, cls: type[Settings], given: dict[str, object]) -> str:
    """With the flag or variable and its value, unless that is a secret, or, of a rule of ours over several flags, what
    that says."""
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    name = str(fault["loc"][0])
    flag = f"--{name.replace('_', '-')}"
    if fault["type"] == "missing":
        return f"{flag} or {variable(cls, name)} is needed"
    source = flag if name in given else variable(cls, name)
    is_secret = cls.model_fields[name].annotation is SecretStr
    return f"{source}: {message}" if is_secret else f"{source}: {message} (got {fault['input']!r})"
