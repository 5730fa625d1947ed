"""Options of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="long runs of the tests marked soak")


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether the long version was asked for."""
    return bool(request.config.getoption("--soak"))
