"""Norms, activations, embedding in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.elementwise import RmsNormKernel
from worker.parallel.group import Group


class RmsNorm(RmsNormKernel):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        residual.add_(group.all_reduce(x))
        return rms_norm(residual, weight, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of x's dtype, whatever the weight's."""
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `GatedActivationKernel`."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See `GatedActivationKernel`."""
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def embedding(ids: Tensor, table: Tensor, first: int | None = None, residual: Tensor | None = None) -> Tensor:
    """See `EmbeddingKernel`."""
    if residual is not None:
        residual.zero_()
    if first is None:
        return functional.embedding(ids, table)
    local = ids - first
    foreign = (local < 0) | (local >= len(table))
    return functional.embedding(local.masked_fill(foreign, 0), table).masked_fill_(foreign[:, None], 0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, neox pairing: x [T, heads, D], cos and sin [T, 1, rotary_dim] as in `RopeTable`."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), -1)
    swapped = torch.roll(x, width // 2, -1)
    return (x * cos).addcmul_(swapped, sin)
