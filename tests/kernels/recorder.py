"""Graphs of a GPU that is not there: what a captured step would launch, noted and never done."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from worker.runner.timer import CpuTiming


class Recording(TorchDispatchMode):
    """A `Graph` of the runner that is never replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and "empty" not in name and name != "detach":
            self.launches.append(f"|{name}")
        return func(*args, **(kwargs or {}))

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        raise AssertionError("nothing was launched")


class Recorder:
    """See `GraphDevice`."""

    rehearses = False

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> Recording:
        self.recordings.append(Recording())
        return self.recordings[-1].__enter__()

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor

    def marks(self) -> CpuTiming:
        return CpuTiming()

    def note(self) -> Callable[..., None]:
        """In place of a kernel's launch."""

        def launch(kernel: JITFunction, *args: object, launch_pdl: bool = False, **options: object) -> None:
            self.recordings[-1].launches.append(kernel.__name__ if launch_pdl else f"|{kernel.__name__}")

        return launch
