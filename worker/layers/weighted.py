"""Layers that load tensors of a checkpoint. Their names follow from where the layer stands in the module tree."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from worker.loader.checkpoint import LazyTensor, WeightTarget


class WeightedLayer(nn.Module, ABC):
    """A leaf of the module tree with this rank's shard of some tensors."""

    @abstractmethod
    def weight_targets(self, path: str) -> dict[str, WeightTarget]:
        """Checkpoint name → how to load it; `path` is the layer's own name in the tree."""

    @abstractmethod
    def weights(self) -> Iterable[Tensor]:
        """As loaded, before they are packed."""

    def fill(self, noise: Callable[[Tensor], object]) -> None:
        """With what `noise` leaves in a matrix, in place of a checkpoint's; vectors stay as they are."""
        for weight in self.weights():
            if weight.dim() > 1:
                noise(weight)

    def pack(self) -> int:
        """Called once, when loaded: brings weights into the layout that the kernels read. Returns their bytes as the
        device holds them."""
        return sum(weight.nbytes for weight in self.weights())


def weight_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """Of every weighted layer in the tree."""
    targets: dict[str, WeightTarget] = {}
    for path, module in model.named_modules():
        if isinstance(module, WeightedLayer):
            targets |= module.weight_targets(path)
    return targets


def sibling(path: str, name: str) -> str:
    """The name of what stands beside `path` in the tree."""
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name


def expect_shape(tensor: LazyTensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"its shape is {tuple(tensor.shape)}, the model expects {shape}")
