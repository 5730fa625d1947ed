"""Experts that stay in whole numbers: sizes, backends, one call."""

import torch
from torch import Tensor

from worker.kernels.native.library import obstacle
from worker.layers.experts import RoutedExperts

BACKENDS = ["torch"] if obstacle() else ["torch", "native"]
NUM, HIDDEN, INNER = 4, 256, 256


def run(experts: RoutedExperts) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, HIDDEN, generator=generator), torch.rand(9, 2, generator=generator)
    ids = torch.rand(9, NUM, generator=generator).topk(2).indices
    return experts(x, weights, ids, None)
