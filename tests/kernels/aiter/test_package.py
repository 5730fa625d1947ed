"""Whether AITER is there: what is wrong is said, and only what this release has not is passed over."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from worker.kernels.aiter import package
from worker.kernels.elementwise import RMS_NORM, NormSpec
from worker.kernels.operation import KernelBackendError
from worker.kernels.select import Kernels

CPU = torch.device("cpu")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that goes before all others, where `aiter` may be put; the device is an AMD GPU."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(package, "architecture", lambda device: "gfx942")
    yield tmp_path
    sys.modules.pop("aiter", None)


def put(site: Path, text: str) -> None:
    (site / "aiter.py").write_text(text)


def test_an_aiter_that_can_be_imported_is_no_obstacle(site: Path) -> None:
    put(site, "")
    assert package.obstacle(CPU) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('ROCm version file not found')", "cannot be imported: ROCm version file not found"),
        ("raise ModuleNotFoundError(name='aiter')", "'amd-aiter' is not installed"),
        ("import einops_of_no_one", "needs einops_of_no_one"),
    ],
)
def test_what_is_wrong_is_said_to_who_asked_for_it(site: Path, text: str, message: str) -> None:
    put(site, text)
    with pytest.raises(KernelBackendError, match=message):
        Kernels(CPU, "aiter")


def test_a_device_of_another_kind_is_an_obstacle() -> None:
    assert package.obstacle(CPU) == "it needs an AMD GPU and a ROCm build of torch"


def test_what_a_release_has_not_is_none_and_what_is_broken_is_an_error(site: Path) -> None:
    put(site, "def rms_norm(): ...")
    assert package.operation("aiter", "rms_norm") is not None
    assert package.operation("aiter", "of_a_later_release") is None
    assert package.operation("aiter.of_a_later_release", "rms_norm") is None
    (site / "broken_aiter.py").write_text("import one_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="one_that_is_not_there"):
        package.operation("broken_aiter", "rms_norm")


def test_an_amd_gpu_without_it_goes_on_with_a_warning(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(site, "raise RuntimeError('ROCm version file not found')")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernels = Kernels(torch.device("cuda"))
    kernels.choose(RMS_NORM, NormSpec(8), torch.bfloat16)
    assert kernels.describe() == {"rms_norm": "torch"}
    assert "ROCm version file not found" in caplog.text
