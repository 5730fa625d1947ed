"""What every layer is made with."""

from dataclasses import dataclass

import torch

from worker.kernels.select import Kernels
from worker.parallel.group import Group


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """`dtype` is that of weights and activations, unless a layer has one of its own."""

    kernels: Kernels
    tp: Group
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.kernels.device
