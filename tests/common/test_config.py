"""Flags, environment and faults of a service's settings."""

from typing import Literal

import pytest
from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from common.config import CommaList, Settings, parse_settings, warn_of_unknown_variables


class Example(Settings):
    """An example."""

    model_config = SettingsConfigDict(env_prefix="EXAMPLE_")
    port: int = Field(1, ge=0, le=65535, description="Port.")
    wait: float = Field(1.0, ge=0, description="Seconds.")
    workers: CommaList = Field((), description="Workers.")
    metrics: bool = Field(True, description="Serve metrics.")
    policy: Literal["hash", "radix"] | None = Field(None, description="Policy.")
    key: SecretStr = Field(SecretStr("k3y"), description="Key.")

    @model_validator(mode="after")
    def _check_together(self) -> "Example":
        if self.port == 13 and not self.workers:
            raise ValueError("port 13 needs workers")
        return self


def parse(*argv: str) -> Example:
    return parse_settings(Example, list(argv), "example")


def test_defaults():
    assert parse() == Example(port=1, workers=(), metrics=True)


def test_flag_wins_over_environment(monkeypatch):
    monkeypatch.setenv("EXAMPLE_PORT", "7")
    assert parse().port == 7
    assert parse("--port", "8").port == 8


@pytest.mark.parametrize("argv", [("--workers", "a:1,b:2"), ("--workers", "a:1", "--workers", "b:2")])
def test_lists_by_comma_or_repetition(argv):
    assert parse(*argv).workers == ("a:1", "b:2")


def test_list_from_environment(monkeypatch):
    monkeypatch.setenv("EXAMPLE_WORKERS", "a:1, b:2")
    assert parse().workers == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--port", "70000"), "example: --port: Input should be less than or equal to 65535 (got '70000')"),
        (("--port", "x"), "example: --port: Input should be a valid integer"),
        (("--wait", "inf"), "example: --wait: Input should be a finite number (got 'inf')"),
        (("--wait", "nan"), "example: --wait: Input should be a finite number (got 'nan')"),
        (("--prot", "1"), "Did you mean"),
    ],
)
def test_faults_exit_2_and_name_the_flag(argv, said, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(*argv)
    assert exited.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed


class Needing(Settings):
    """With secrets and what has no default."""

    model_config = SettingsConfigDict(env_prefix="EXAMPLE_")
    secret: SecretStr = Field(description="Secret.", min_length=8)
    place: str = Field(description="Place.")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "example: --secret or EXAMPLE_SECRET is needed\nexample: --place or EXAMPLE_PLACE is needed\n"),
        (("--secret", "of eight characters"), "example: --place or EXAMPLE_PLACE is needed\n"),
        (
            ("--secret", "short", "--place", "a"),
            "example: --secret: Value should have at least 8 items after validation, not 5\n",
        ),
    ],
)
def test_no_fault_shows_a_secret(argv, said, capsys):
    with pytest.raises(SystemExit):
        parse_settings(Needing, list(argv), "example")
    assert capsys.readouterr().err == said


def test_help_says_what_is_needed(capsys):
    with pytest.raises(SystemExit):
        parse_settings(Needing, ["--help"], "example")
    assert "Place. Needed.  [env var: EXAMPLE_PLACE]" in capsys.readouterr().out


HELP = """\
Usage: fissile example [OPTIONS]

  An example.

Options:
  --port INTEGER
        Port.  [env var: EXAMPLE_PORT; default: 1]
  --wait NUMBER
        Seconds.  [env var: EXAMPLE_WAIT; default: 1.0]
  --workers TEXT,...
        Workers.  [env var: EXAMPLE_WORKERS]
  --metrics / --no-metrics
        Serve metrics.  [env var: EXAMPLE_METRICS;
        default: metrics]
  --policy [hash|radix]
        Policy.  [env var: EXAMPLE_POLICY]
  --key TEXT
        Key.  [env var: EXAMPLE_KEY]
  -h, --help
        Show this message and exit.
"""


def test_help_has_defaults_and_whole_names_of_variables_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as exited:
        parse("--help")
    assert exited.value.code == 0
    assert capsys.readouterr().out.strip() == HELP.strip()


def test_a_fault_in_the_environment_names_the_variable(capsys, monkeypatch):
    monkeypatch.setenv("EXAMPLE_PORT", "tcp://10.0.0.1:1")
    with pytest.raises(SystemExit):
        parse()
    assert capsys.readouterr().err.startswith("example: EXAMPLE_PORT: Input should be a valid integer")


def test_misspelt_variables_are_named_and_those_of_kubernetes_are_not(monkeypatch, caplog):
    for name in ("EXAMPLE_PROT", "EXAMPLE_COLOUR", "EXAMPLE_POLICY", "EXAMPLES_PORT"):
        monkeypatch.setenv(name, "hash")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50051_TCP_ADDR"):
        monkeypatch.setenv(f"EXAMPLE_{name}", "1")
    warn_of_unknown_variables(Example)
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable EXAMPLE_COLOUR is no setting and counts for nothing",
        "the environment variable EXAMPLE_PROT is no setting and counts for nothing; is EXAMPLE_PORT meant?",
    ]


@pytest.mark.parametrize("argv", [("--no-metrics",), ()])
def test_switches(argv, monkeypatch):
    assert parse(*argv).metrics is not bool(argv)
    monkeypatch.setenv("EXAMPLE_METRICS", "false")
    assert parse("--metrics").metrics and not parse().metrics


def test_a_rule_over_several_flags_says_what_it_says(capsys):
    with pytest.raises(SystemExit):
        parse("--port", "13")
    assert capsys.readouterr().err == "example: port 13 needs workers\n"
