from collections.abc import Iterator

import pytest

from fissile import Client
from tests.fissile.fake_service import FakeService, serve


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
