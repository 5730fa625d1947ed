import pytest

from tests.worker import harness


@pytest.fixture(autouse=True)
def _first_prompts() -> None:
    harness.restart_prompts()
