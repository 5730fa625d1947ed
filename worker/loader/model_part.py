"""What of a checkpoint a model uses: other tensors may stand beside it, and names may begin with that of a whole."""

import logging
from collections.abc import Iterable

from worker.loader.checkpoint import Checkpoint, LazyTensor
from worker.loader.config import ModelConfig

logger = logging.getLogger(__name__)


class ModelPart:
    """Implements `Checkpoint`."""

    def __init__(self, stored: Checkpoint, config: ModelConfig) -> None:
        self._stored = stored
        kept = [name for name in stored.names() if not name.startswith(config.skipped_weights)]
        self._names = {name.removeprefix(config.weight_prefix): name for name in kept}
        """Name in the model → name in the checkpoint."""

    def names(self) -> Iterable[str]:
        return self._names

    def tensor(self, name: str, packed: bool = False) -> LazyTensor:
        return self._stored.tensor(self._names[name], packed)

    def log_unused(self) -> None:
        unused = sorted(set(self._stored.names()) - set(self._names.values()))
        if unused:
            logger.info("%d tensors of the checkpoint are not used: %s ... %s", len(unused), unused[0], unused[-1])
