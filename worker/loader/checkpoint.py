"""What layers load their weights from, and the one walk that fills a model."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from worker.loader.errors import WeightsError


class LazyTensor(Protocol):
    """A tensor of a checkpoint that is not read yet."""

    shape: tuple[int, ...]

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """The slice `start … start + length` of dimension `dim` (all of it by default), on the host.

        Only the slice is read from the file, where its layout allows. The result may be a view of the mapped file:
        copy it, do not write to it.
        """


WeightTarget = Callable[[LazyTensor], None]
"""Puts one tensor of a checkpoint (this rank's part of it) where a layer keeps it."""


class Checkpoint(Protocol):
    """A set of tensors under Hugging Face's names."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> LazyTensor: ...


def fill(targets: dict[str, WeightTarget], checkpoint: Checkpoint, ignored: frozenset[str] = frozenset()) -> None:
    """Load every target. Raises WeightsError naming missing and unexpected tensors, or a wrong shape.

    `ignored` names may be in the checkpoint and are not read.
    """
    present = set(checkpoint.names())
    missing = sorted(targets.keys() - present)
    unexpected = sorted(present - targets.keys() - ignored)
    if missing or unexpected:
        parts = [f"{len(names)} {what}: {_listed(names)}"
                 for what, names in (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
        raise WeightsError("the checkpoint does not fit the model; tensors " + "; ".join(parts))
    for name, load in targets.items():
        try:
            load(checkpoint.tensor(name))
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"tensor {name}: {error}") from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
