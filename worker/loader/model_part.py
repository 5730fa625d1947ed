"""What of a checkpoint a model uses: other tensors may stand beside it, and its names may begin in another way."""

import logging
from collections.abc import Iterable

from worker.loader.checkpoint import Checkpoint, LazyTensor
from worker.loader.config import ModelConfig
from worker.loader.errors import WeightsError

logger = logging.getLogger(__name__)


class ModelPart:
    """Implements `Checkpoint`."""

    def __init__(self, stored: Checkpoint, config: ModelConfig, beginnings: tuple[str, ...] = ("",)) -> None:
        """`beginnings`: only what begins in one of these ways, as in the model. Raises WeightsError."""
        self._stored = stored
        self._names: dict[str, str] = {}
        """Name in the model → name in the checkpoint."""
        for name in stored.names():
            ours = renamed(name, config.weight_prefixes)
            if not ours.startswith(beginnings) or ours.startswith(config.skipped_weights):
                continue
            if ours in self._names:
                raise WeightsError(f"tensors {self._names[ours]} and {name} are both {ours} of the model")
            self._names[ours] = name

    def names(self) -> Iterable[str]:
        return self._names

    def tensor(self, name: str, packed: bool = False) -> LazyTensor:
        return self._stored.tensor(self._names[name], packed)

    def log_unused(self) -> None:
        unused = sorted(set(self._stored.names()) - set(self._names.values()))
        if unused:
            logger.info("%d tensors of the checkpoint are not used: %s ... %s", len(unused), unused[0], unused[-1])


def renamed(name: str, beginnings: tuple[tuple[str, str], ...]) -> str:
    """With another beginning, by the first of these that fits."""
    for old, new in beginnings:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
