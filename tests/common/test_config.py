"""Flags, environment and faults of a service's settings."""

import pytest
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from common.config import CommaList, Settings, parse_settings


class Example(Settings):
    """An example."""

    model_config = SettingsConfigDict(env_prefix="EXAMPLE_")
    port: int = Field(1, ge=0, le=65535, description="Port.")
    workers: CommaList = Field((), description="Workers.")
    metrics: bool = Field(True, description="Serve metrics.")

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
        (("--prot", "1"), "unrecognized arguments: --prot"),
    ],
)
def test_faults_exit_2_and_name_the_flag(argv, said, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(*argv)
    assert exited.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed


def test_help_exits_0(capsys):
    with pytest.raises(SystemExit) as exited:
        parse("--help")
    assert exited.value.code == 0
    assert "Serve metrics." in capsys.readouterr().out


def test_a_rule_over_several_flags_says_what_it_says(capsys):
    with pytest.raises(SystemExit):
        parse("--port", "13")
    assert capsys.readouterr().err == "example: port 13 needs workers\n"
