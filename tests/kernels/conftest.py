from collections.abc import Iterator

import pytest
import torch

from tests.kernels.rig import BACKENDS, DTYPES, IS_INTERPRETED, Rig
from worker.kernels.select import Kernels


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton's interpreter is slow: there the cases of a test take turns between the types, each case in one of them. A
    test of one case runs in all."""
    if not IS_INTERPRETED:
        return
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        case = item.nodeid
        for dtype in map(str, DTYPES):
            case = case.replace(dtype, "")
        cases.setdefault(case.partition("[")[0], {}).setdefault(case, []).append(item)
    left_out = {
        item
        for of_test in cases.values()
        if len(of_test) > 1
        for number, of_case in enumerate(of_test.values())
        if len(of_case) > 1
        for item in of_case
        if str(DTYPES[number % len(DTYPES)]) not in item.name
    }
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


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
