"""Options of the whole test suite."""

import gc
import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes tells how busy the machine is, no more. What hangs meets the timeout of its test.
settings.register_profile("fissile", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", parent=settings.get_profile("fissile"), database=None)
settings.load_profile("fissile")
# How late an event loop is, too: tests that want no warnings are not of that.
logging.getLogger("common.loop_lag").setLevel(logging.ERROR)
# A gRPC server that ends unstarted logs itself while it is freed (DEBUG). Who keeps that record, as caplog does, points
# to freed memory, and the process dies of it some tests later (segmentation fault, grpcio 1.85).
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)
# Who starts the suite in the background of a shell has it ignore Ctrl-C, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="long runs of the tests marked soak")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: how many examples they try depends on it."""
    if config.getoption("--soak"):
        settings.load_profile("soak")


def pytest_collection_finish() -> None:
    """What is imported stays: no look for garbage goes through it, which would take most of its time."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """Files, sockets and processes that tests left open are errors in the file that left them, and not in another one
    that happens to run when Python finds them. First of its scope, so that the others have ended."""
    yield
    gc.collect()


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether the long version was asked for."""
    return bool(request.config.getoption("--soak"))
