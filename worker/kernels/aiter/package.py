"""AMD's AITER: whether it can serve a device, and its operations by name.

AITER changes from release to release, and so does what it has. An operation that is not there is none, and the table
goes on to what stands behind it; where AITER itself is missing or broken, the backend cannot be had at all.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

NATIVE_ARCHITECTURES = ("gfx942", "gfx950")
"""MI300X, MI325X; MI350X, MI355X: what AITER's assembly is written for."""

Need = tuple[str, str]
"""A module of AITER's and the name of an operation in it."""

INSTALL = "use an image that has it (rocm/atom, or deploy/worker.rocm.Dockerfile), or build it: docs/amd.md"


def architecture(device: torch.device) -> str | None:
    """Of an AMD GPU, such as gfx942; None for any other device."""
    if torch.version.hip is None or device.type != "cuda":
        return None
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name.partition(":")[0]


def obstacle(device: torch.device) -> str | None:
    """Why AITER cannot serve `device`; None where it can."""
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    if "aiter" in installed and "amd-aiter" not in installed:
        return (
            "the installed package 'aiter' is an unrelated library of asynchronous iterators; "
            "AMD's kernels are the package 'amd-aiter': pip uninstall aiter, then " + INSTALL
        )
    if architecture(device) is None:
        return "it needs an AMD GPU and a ROCm build of torch"
    try:
        importlib.import_module("aiter")
    except ModuleNotFoundError as error:
        if error.name == "aiter":
            return f"the package 'amd-aiter' is not installed: {INSTALL}"
        return f"AITER needs {error.name}, which is not installed"
    except (ImportError, RuntimeError, OSError) as error:
        return f"AITER cannot be imported: {error}"
    return None


def operation(module: str, name: str) -> Callable[..., Any] | None:
    """What AITER calls `name` in `module`; None where this release has no such thing."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise
    return vars(found).get(name)


def required(module: str, name: str) -> Callable[..., Any]:
    """An operation that `supports` has seen."""
    found = operation(module, name)
    assert found is not None, f"{module}.{name}"
    return found
