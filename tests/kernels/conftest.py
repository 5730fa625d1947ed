from collections.abc import Iterator

import pytest
import torch

from tests.kernels.rig import BACKENDS, DTYPES, Rig
from worker.kernels.select import Kernels


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """New tensors are full of NaN until written: torch's deterministic mode does that."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=BACKENDS, ids="-".join)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    name, device = request.param
    return Kernels(torch.device(device), name)


@pytest.fixture(params=DTYPES, ids=str)
def rig(request: pytest.FixtureRequest, kernels: Kernels) -> Rig:
    return Rig(kernels, request.param)
