"""For tests alone: AITER's Triton operations on a machine without an AMD GPU.

They are AITER's own kernels and launch code: run by Triton's interpreter on a CPU, compiled for an AMD GPU that is not
there, or run on an NVIDIA GPU. What is faked is the machine around them, and `import aiter`, which needs ROCm.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpreterBuilder
from triton.runtime.jit import JITFunction

from tests.kernels.absent import AbsentGpu
from worker.kernels.aiter import package

ONLY_ON_AMD = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Launch options that Triton's compiler for NVIDIA refuses."""


@contextmanager
def on_cpu(architecture: str) -> Iterator[None]:
    """Every device is such an AMD GPU, as far as `worker.kernels.aiter` and AITER can tell; kernels are interpreted, or
    compiled and not launched."""
    properties = SimpleNamespace(multi_processor_count=8, name="none", gcnArchName=architecture)
    with ExitStack() as stack:
        for name, value in (
            ("get_device_properties", lambda *_: properties),
            ("current_device", lambda: 0),
            ("device", lambda *_: nullcontext()),
        ):
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(triton.runtime.driver, "_active", _Driver(GPUTarget("hip", architecture, 64))))
        stack.enter_context(patch.object(InterpreterBuilder, "create_assume", lambda *_: None))
        stack.enter_context(_pretended(architecture))
        yield


@contextmanager
def on_nvidia(architecture: str) -> Iterator[None]:
    """The same on a real GPU of NVIDIA's: kernels run, without the options that only AMD's compiler knows."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name not in ONLY_ON_AMD or name in self.arg_names}
        while True:
            try:
                return launch(self, *args, **known)
            except OutOfResources:
                # A stage of AMD's pipeline takes no memory of its own where one of NVIDIA's does.
                known["num_stages"] = known.get("num_stages", 2) - 1
                if not known["num_stages"]:
                    raise

    with patch.object(JITFunction, "run", run), _pretended(architecture):
        yield


@contextmanager
def _pretended(architecture: str) -> Iterator[None]:
    """AITER's modules stay what they were when they were first imported: one architecture a process."""
    if not isinstance(sys.modules.get("aiter"), _BareAiter):
        sys.modules["aiter"] = _BareAiter(architecture)
        sys.modules["aiter.tuned_gemm"] = None  # type: ignore[assignment]  # needs what `aiter` has only with ROCm
        # Read from Triton's driver, which on NVIDIA has another answer; other modules copy it at import.
        importlib.import_module("aiter.ops.triton.utils._triton.arch_info").get_arch = lambda: architecture
    with patch.object(package, "architecture", lambda device: architecture):
        yield


class _BareAiter(ModuleType):
    """The package without what its `__init__` does, which needs ROCm."""

    def __init__(self, architecture: str) -> None:
        super().__init__("aiter")
        self.__spec__ = importlib.util.find_spec("aiter")
        assert self.__spec__ is not None and self.__spec__.origin is not None
        self.__path__ = [str(Path(self.__spec__.origin).parent)]
        self.logger = logging.getLogger("aiter")
        fp8 = torch.float8_e4m3fnuz if architecture == "gfx942" else torch.float8_e4m3fn
        self.dtypes = SimpleNamespace(fp8=fp8, fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32)


class _Driver(AbsentGpu):
    """With what AITER asks of one."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda
