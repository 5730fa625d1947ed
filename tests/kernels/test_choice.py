"""Which implementation the kernel table chooses."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.rig import CPU
from worker.kernels.elementwise import RMS_NORM, NormSpec
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.select import Kernels
from worker.kernels.torch import linear as torch_linear
from worker.kernels.torch.linear import OneDnnLinear, PlainLinear


@pytest.fixture(autouse=True)
def own_verdict() -> Iterator[None]:
    """On the packed product, which is found once a process."""
    torch_linear._onednn_works.cache_clear()
    yield
    torch_linear._onednn_works.cache_clear()


def linear_kernel() -> object:
    return Kernels(CPU, "torch").choose(LINEAR, LinearSpec(8, 8), torch.float32)


def test_wrong_results_of_the_packed_product_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OneDnnLinear.__call__
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x, packed, out=None: right(self, x, packed) * 1.01)
    assert isinstance(linear_kernel(), PlainLinear)


def test_missing_packed_operator_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: OneDnnLinear) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(OneDnnLinear, "__init__", missing)
    assert isinstance(linear_kernel(), PlainLinear)


def test_the_table_says_what_was_chosen() -> None:
    kernels = Kernels(CPU, "torch")
    kernels.choose(RMS_NORM, NormSpec(8), torch.float32)
    assert kernels.describe() == {"rms_norm": "torch"}
    assert kernels.choose(RMS_NORM, NormSpec(8), torch.float32) is kernels.choose(RMS_NORM, NormSpec(8), torch.float32)
