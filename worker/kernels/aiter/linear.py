"""Dense products of AITER: hipBLASLt, assembly or skinny kernels by its table of tuned shapes, or Triton."""

from typing import ClassVar

from torch import Tensor

from worker.kernels.aiter.package import Need, required
from worker.kernels.torch.linear import PackedLinear, PlainLinear

TRITON_GEMM = "aiter.ops.triton.gemm_a16w16"
CONFIGURED_ARCHITECTURES = ("gfx942", "gfx950")
"""For which AITER has the tiles of its Triton product; elsewhere it fails."""


class TunedLinear(PlainLinear):
    NEEDS: ClassVar[tuple[Need, ...]] = (("aiter.tuned_gemm", "tgemm"),)

    def __init__(self) -> None:
        self._product = required("aiter.tuned_gemm", "tgemm").mm  # type: ignore[attr-defined]

    def __call__(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        product: Tensor = self._product(x, packed.weight, packed.bias)
        return product if out is None else out.copy_(product)


class TritonLinear(PlainLinear):
    NEEDS: ClassVar[tuple[Need, ...]] = ((TRITON_GEMM, "gemm_a16w16"),)

    def __init__(self) -> None:
        self._product = required(TRITON_GEMM, "gemm_a16w16")

    def __call__(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        product: Tensor = self._product(x, packed.weight, packed.bias, dtype=x.dtype, y=out)
        return product
