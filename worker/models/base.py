"""What the runner asks of every model."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from worker.attention.interface import CacheLayer
from worker.kernels.linear import Finder
from worker.layers.embedding import OutputHead
from worker.layers.weighted import weight_targets
from worker.loader.checkpoint import WeightTarget


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over caches that builders own."""

    vocab_size: int
    """Width of the logits."""

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoint name → how to load it, for every tensor the model needs. The names are those of the module tree;
        a family whose checkpoints differ says so here."""
        return weight_targets(self)

    def cache_layers(self) -> list[CacheLayer]:
        """Those with a cache of their own, in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, CacheLayer) and module.owns_cache]

    def output_head(self) -> OutputHead | None:
        """What makes logits of hidden states, and nothing else does; None where a model does more."""
        return None

    def finder(self) -> Finder | None:
        """As `OutputHead.finder`, once weights are loaded."""
        head = self.output_head()
        return None if head is None else head.finder()

    @abstractmethod
    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] → last hidden state [T, hidden], or [W, hidden] of the tokens that the forward context, inside of
        which it runs, says are wanted."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor | None:
        """[R, hidden] → [R, vocabulary] on rank 0; None on the others."""
