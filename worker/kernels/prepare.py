"""The runner's own operations on slots: what a step's rows are, and what was sampled for them.

Conventions are those of `operation`.
"""

from typing import Protocol

from torch import Tensor

from worker.kernels.operation import Operation
from worker.kernels.step import SlotTables, StagedRows, Step, StepBuffers


class PrepareKernel(Protocol):
    def __call__(self, rows: StagedRows, slots: SlotTables, step: Step, block_size: int, out: StepBuffers) -> None:
        """Fill the beginning of `out` from what the device knows of the rows' slots."""


class RememberKernel(Protocol):
    def __call__(self, slots: SlotTables, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Sampled tokens become the last known ones of their sequences: in the slots `rows`, which differ, at these
        positions. All int64 [R]; a negative token id stands for none, and leaves a 0."""


PREPARE_STEP: Operation[None, PrepareKernel] = Operation("prepare_step")
REMEMBER: Operation[None, RememberKernel] = Operation("remember")
