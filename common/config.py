"""Typed configuration from flags and environment, one declaration for both (pydantic-settings).

A service declares a subclass of `Settings`, each field with a description; `--help`, the flags (`--kebab-case`), the
environment variables (`<PREFIX>FIELD`) and validation follow from it. A flag wins over the environment.
"""

import sys
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
)

S = TypeVar("S", bound="Settings")


def _split(value: object) -> object:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list):
        return value
    return tuple(word.strip() for part in parts for word in str(part).split(",") if word.strip())


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of words, as a repeated flag or separated by commas (flag or environment)."""

EXIT_USAGE = 2


class Settings(BaseSettings):
    """Base of a service's settings. Immutable."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # of all settings at once, an API key among them
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        nested_model_default_partial_update=True,
    )


def parse_settings(cls: type[S], argv: list[str], prog: str) -> S:
    """Settings from `argv` and the environment. Prints one line a fault to standard error and exits 2 on bad values;
    `--help` prints and exits 0; unknown flags exit 2 with the usage."""
    try:
        source: CliSettingsSource[S] = CliSettingsSource(cls, cli_prog_name=prog, cli_parse_args=False)
        return CliApp.run(cls, cli_args=argv, cli_settings_source=source)
    except ValidationError as error:
        for fault in error.errors():
            print(f"{prog}: {_described(fault)}", file=sys.stderr)
    except SettingsError as error:
        print(f"{prog}: {error}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def _described(fault: ErrorDetails) -> str:
    """With the flag and its value, or, of a rule of ours over several flags, what that says."""
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    flag = "--" + ".".join(str(part).replace("_", "-") for part in fault["loc"])
    return f"{flag}: {message} (got {fault['input']!r})"
