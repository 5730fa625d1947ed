"""What the runner asks of every model."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from worker.layers.attention import PagedAttention
from worker.loader.checkpoint import WeightTarget


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over the paged cache."""

    @abstractmethod
    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoint name → how to load it, for every tensor the model needs."""

    @abstractmethod
    def attention_layers(self) -> list[PagedAttention]:
        """In the order of the layers."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [T] each → last hidden state [T, hidden]. Runs inside a forward context."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] → [R, vocabulary]."""
