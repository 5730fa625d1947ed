from collections.abc import Iterator

import pytest
import torch

from tests.kernels.rig import BACKENDS, DTYPES, IS_INTERPRETED, Rig
from worker.kernels.select import Kernels


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton's interpreter is slow: there one test a file runs in half precision. Others differ in shape, which float32
    covers; what is compiled for GPUs is in bfloat16."""
    if not IS_INTERPRETED:
        return
    seen: set[str] = set()
    left_out: list[pytest.Item] = []
    for item in list(items):
        if str(torch.float16) not in item.name:
            continue
        name = item.nodeid.partition("::")[0]
        if name in seen:
            items.remove(item)
            left_out.append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)


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
