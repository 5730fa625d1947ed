"""Each case is built once for all tests of its process."""

import pytest
import torch

from tests.models.cases import all_cases
from tests.models.saved import Saved, save


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save(make, folder / name) for name, make in all_cases().items()}


@pytest.fixture(params=all_cases())
def saved(request: pytest.FixtureRequest, saved_cases: dict[str, Saved]) -> Saved:
    return saved_cases[request.param]
