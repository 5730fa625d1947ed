"""Greedy tokens by the library's threads; whatever is drawn is torch's."""

import torch
from torch import Tensor

from worker.kernels.native.library import engine, obstacle
from worker.kernels.sampling import Draws
from worker.kernels.torch.sample import choose


class NativeChoose:
    """See `ChooseKernel`."""

    def __init__(self) -> None:
        self._engine = engine()

    def __call__(self, logits: Tensor, rows: Tensor | None, draws: Draws) -> Tensor:
        if draws.rules.num_drawn > 0 or logits.dtype != torch.float32:
            return choose(logits, rows, draws)
        ids = torch.empty(len(draws.slots), dtype=torch.int64)
        self._engine.best(logits, rows, ids)
        return ids


def supports_choose(_: None, device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and obstacle() is None
