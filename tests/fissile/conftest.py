import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fissile import Client
from fissile.cli import main
from tests.fissile.fake_service import FakeService, serve

FISSILE = str(Path(sys.executable).parent / "fissile")
"""The command, as it is installed."""


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def address(service: FakeService) -> Iterator[str]:
    with serve(service) as bound:
        yield bound


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as connected:
        yield connected


@pytest.fixture
def run(address: str) -> Callable[..., Result]:
    """Run a command against the fake service."""

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, list(arguments), input=stdin, env={"FISSILE_ADDRESS": address})

    return invoke
