"""What a greedy step of few rows launches, and what of it overlaps: `python -m tests.kernels.lone_step 1`. Prints as
JSON, by the longest context of the step's graph, kernels and torch's own operations in order; those that begin only
when what is before them has ended have a `|` before their names.

The graph is captured as on an H100 that need not be there, of two layers.
"""

import json
import sys

import triton
from triton.runtime.jit import JITFunction

from tests.kernels.compile_triton import Driver
from tests.kernels.first_steps import build_assembly, capture
from tests.kernels.recorder import Recorder


def main(num_rows: int) -> None:
    triton.runtime.driver.set_active(Driver(90))
    assembly, device = build_assembly(), Recorder()
    JITFunction.run = device.note()
    graphs = capture(assembly, device, (num_rows,))
    found = {}
    for full in graphs.full[num_rows]:
        assert full.takes is not None
        found[full.max_context_len] = next(full.takes).graph.launches
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
