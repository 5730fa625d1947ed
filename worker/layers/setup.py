"""What every layer is made with."""

from dataclasses import dataclass

import torch

from worker.kernels.interface import LINEAR, LinearSpec
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Quantization
from worker.parallel.group import ALONE, Group


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """`dtype` is that of weights and activations, unless a layer has one of its own."""

    kernels: Kernels
    tp: Group
    dtype: torch.dtype
    quantization: Quantization = "none"
    """Of linear layers and tables of a shape that a kernel for blocks takes. "stored" is for a rank that is alone."""
    ep: Group = ALONE
    """Whose ranks share the experts out; of one rank: each holds its part (of `tp`) of every expert."""
    dp: Group = ALONE
    """Ranks whose tokens' experts are on all of `ep`: a layer of experts takes their tokens, too (`TokenExchange`)."""

    cache_dtype: torch.dtype | None = None
    """Of keys and values in the cache: float8_e4m3; None: `dtype`."""
    has_cache_scales: bool = False
    """The checkpoint has scales for such a cache."""

    def quantization_of(self, in_features: int, out_features: int) -> Quantization:
        """Of a layer of this shape."""
        spec = LinearSpec(in_features, out_features, Blocks)
        if self.quantization == "none" or self.kernels.find(LINEAR, spec, self.dtype) is None:
            return "none"
        return self.quantization

    @property
    def device(self) -> torch.device:
        return self.kernels.device
