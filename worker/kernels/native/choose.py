"""Choosing tokens by the library's threads."""

import torch
from torch import Tensor

from worker.kernels.native.library import Choose, engine, obstacle, pointer
from worker.kernels.native.slots import NativeRemember
from worker.kernels.sampling import ChooseKernel, Draws
from worker.kernels.step import SlotTables
from worker.kernels.torch.sample import choose


class NativeChoose(ChooseKernel):
    """Of logits in float32; others are torch's."""

    def __init__(self) -> None:
        self._engine, self._remember = engine(), NativeRemember()

    def __call__(
        self, logits: Tensor, rows: Tensor | None, draws: Draws, remembered: SlotTables | None = None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if logits.dtype != torch.float32:
            return choose(logits, rows, draws, remembered, out)
        ids = torch.empty(draws.slots.shape[0], dtype=torch.int64) if out is None else out
        parameters, slots, positions = draws.parameters, draws.slots.contiguous(), draws.positions.contiguous()
        self._engine.choose(
            Choose(
                logits.data_ptr(), logits.stride(0), pointer(rows), ids.shape[0], logits.shape[1],
                pointer(parameters.integers), pointer(parameters.floats) if draws.rules.num_drawn else None,
                pointer(slots), pointer(positions), None, ids.data_ptr(),
            )
        )  # fmt: skip
        if remembered is not None:
            self._remember(remembered, slots, positions, ids)
        return ids


def supports_choose(_: None, device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and obstacle() is None
