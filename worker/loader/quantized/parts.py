"""The tensors of a checkpoint that together are one weight."""

from collections.abc import Mapping

from worker.loader.checkpoint import Checkpoint, LazyTensor


class Parts:
    """By the last part of their names."""

    def __init__(self, names: Mapping[str, str], checkpoint: Checkpoint) -> None:
        """`names`: part → tensor's name."""
        self._names, self._checkpoint = names, checkpoint

    def __contains__(self, part: str) -> bool:
        return part in self._names

    def tensor(self, part: str) -> LazyTensor:
        """In the numbers that it is stored in. Raises ValueError."""
        if part not in self._names:
            raise ValueError(f"the checkpoint has {', '.join(sorted(self._names.values()))}, but no {part} beside")
        return self._checkpoint.tensor(self._names[part], packed=True)
