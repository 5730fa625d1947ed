"""What layers load their weights from, and the one walk that fills a model."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.weights import Blocks, Grouped
from worker.loader.errors import WeightsError

NUM_READERS = 4
"""Threads that read: one alone waits for the disk, or for the pages of what is mapped, while memory is idle."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LazyTensor(Protocol):
    """A tensor of a checkpoint that is not read yet."""

    shape: tuple[int, ...]

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """The slice `start … start + length` of dimension `dim` (all of it by default), on the host.

        Only the slice is read from the file, where its layout allows. The result may be a view of the mapped file:
        copy it, do not write to it.
        """

    def stored(self, dim: int, start: int, length: int) -> Blocks | Grouped | None:
        """The slice in the numbers that the checkpoint has; None where these are plain, or the slice is no whole
        blocks, or no kernel reads such ones."""


WeightTarget = Callable[[LazyTensor], None]
"""Puts one tensor of a checkpoint (this rank's part of it) where a layer keeps it."""


def both(first: WeightTarget, second: WeightTarget) -> WeightTarget:
    """Of a tensor that is kept in two places."""

    def load(tensor: LazyTensor) -> None:
        first(tensor)
        second(tensor)

    return load


class Checkpoint(Protocol):
    """A set of tensors under Hugging Face's names."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str, packed: bool = False) -> LazyTensor:
        """`packed`: part of a quantised weight, in whatever numbers it is stored; other tensors are of floats, or a
        ValueError."""


def fill(targets: dict[str, WeightTarget], checkpoint: Checkpoint, tied: bool = False) -> None:
    """Load every target. Raises WeightsError naming missing and unexpected tensors, or a wrong shape.

    `tied`: embedding and head are one tensor, so the checkpoint may have it under either name, or under both.
    """
    present = set(checkpoint.names())
    source = HEAD if tied and EMBEDDING not in present and HEAD in present else EMBEDDING
    stored = {source if name == EMBEDDING else name: load for name, load in targets.items()}
    missing = sorted(stored.keys() - present)
    unexpected = sorted(present - stored.keys() - ({HEAD} if tied else set()))
    if missing or unexpected:
        parts = [f"{len(names)} {what}: {_listed(names)}"
                 for what, names in (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
        raise WeightsError("the checkpoint does not fit the model; tensors " + "; ".join(parts))
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as readers:
        reads = [readers.submit(_read, checkpoint, name, load) for name, load in stored.items()]
        try:
            for read in reads:
                read.result()
        except WeightsError:
            readers.shutdown(cancel_futures=True)
            raise


def _read(checkpoint: Checkpoint, name: str, load: WeightTarget) -> None:
    try:
        with torch.inference_mode():  # of the thread, not of the process
            load(checkpoint.tensor(name))
    except (ValueError, RuntimeError) as error:
        raise WeightsError(f"tensor {name}: {error}") from error


def is_stored_apart(checkpoint: Checkpoint) -> bool:
    """Whether there are an embedding and a head, and they differ. Reads both."""
    if not {EMBEDDING, HEAD} <= set(checkpoint.names()):
        return False
    embedding, head = checkpoint.tensor(EMBEDDING), checkpoint.tensor(HEAD)
    return embedding.shape != head.shape or not torch.equal(embedding.read(), head.read())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
