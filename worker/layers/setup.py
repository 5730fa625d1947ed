"""What every layer is made with."""

from dataclasses import dataclass, replace

import torch

from worker.kernels.gqa import GQA, GqaSpec
from worker.kernels.linear import LINEAR, LinearSpec
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Grouped, Quantization
from worker.parallel.group import ALONE, Group


def quantized_kind(
    kernels: Kernels, dtype: torch.dtype, in_features: int, out_features: int
) -> type[Blocks] | type[Grouped] | None:
    """What kernels for this dtype read a linear layer of this shape in; None: in numbers of the dtype alone."""
    if kernels.find(LINEAR, LinearSpec(in_features, out_features, Blocks), dtype) is not None:
        return Blocks
    has_grouped = kernels.find(LINEAR, LinearSpec(in_features, out_features, Grouped), dtype) is not None
    return Grouped if has_grouped else None


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """`dtype` is that of weights and activations, unless a layer has one of its own."""

    kernels: Kernels
    tp: Group
    dtype: torch.dtype
    quantization: Quantization = "none"
    """Of linear layers and tables of a shape that a kernel for such numbers takes."""
    expert_quantization: Quantization = "none"
    """The same of routed experts."""
    ep: Group = ALONE
    """Whose ranks share the experts out; of one rank: each holds its part (of `tp`) of every expert."""
    dp: Group = ALONE
    """Ranks whose tokens' experts are on all of `ep`: a layer of experts takes their tokens, too (`TokenExchange`)."""

    cache_dtypes: tuple[torch.dtype, ...] = ()
    """Of keys and values, before `dtype`: a layer has the first that a kernel for it keeps."""
    has_cache_scales: bool = False
    """The checkpoint has scales for such a cache."""
    num_drafts: int = 0
    """Most drafts of a row: tokens that may turn out never to have been."""

    def quantization_of(self, in_features: int, out_features: int) -> Quantization:
        """Of a layer of this shape."""
        return "none" if self.kind_of(in_features, out_features) is None else self.quantization

    def kind_of(self, in_features: int, out_features: int) -> type[Blocks] | type[Grouped] | None:
        """What a layer of this shape is packed from, where it is quantised."""
        return (
            None if self.quantization == "none" else quantized_kind(self.kernels, self.dtype, in_features, out_features)
        )

    def with_cache(self, spec: GqaSpec) -> GqaSpec:
        """The same attention, over a cache of the type that this layer has."""
        asked = (replace(spec, dtype=dtype) for dtype in self.cache_dtypes)
        return next((one for one in asked if self.kernels.find(GQA, one, self.dtype) is not None), spec)

    @property
    def device(self) -> torch.device:
        return self.kernels.device
