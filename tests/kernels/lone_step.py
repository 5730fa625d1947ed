"""What a greedy step of few rows launches, and what of it overlaps: `python -m tests.kernels.lone_step 1`. Prints as
JSON, by the longest context of the step's graph, kernels and torch's own operations in order; those that begin only
when what is before them has ended have a `|` before their names.

The graph is captured as on an H100 that need not be there, of two layers.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tests.kernels.compile_triton import Driver
from tests.kernels.first_steps import build_assembly
from worker.runner.assembly import NOTHING
from worker.runner.graphs import GraphCapture, GraphSizes
from worker.runner.greedy import choices_alone
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


@torch.inference_mode()
def main(num_rows: int) -> None:
    triton.runtime.driver.set_active(Driver(90))
    assembly, device = build_assembly(), Recorder()
    parts, JITFunction.run = assembly.parts(NOTHING), device.note()
    greedy = choices_alone(parts.kernels, parts.tp, parts.slots, parts.preparer.buffers)
    capture = GraphCapture(device, parts.model, parts.builders, parts.preparer, assembly.max_model_len, greedy)
    graphs = capture.capture(GraphSizes(rows=(num_rows,)))
    found = {}
    for full in graphs.full[num_rows]:
        assert full.takes is not None
        found[full.max_context_len] = next(full.takes).graph.launches
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
