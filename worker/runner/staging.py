"""One asynchronous copy a step from the host to the device."""

import numpy as np
import torch
from torch import Tensor


class Staging:
    """Collects int64 arrays under names, then moves all of them to the device as one.

    On a GPU the copy starts from pinned memory and nobody waits for it; torch's pinned allocator does not hand a buffer
    out again before the copy that reads it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """int64 arrays of one dimension → device tensors of the same names, valid for this step."""
        sizes = [len(array) for array in arrays.values()]
        host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        np.concatenate(list(arrays.values()), out=host.numpy())
        device = host.to(self._device, non_blocking=True)
        return dict(zip(arrays, device.split(sizes), strict=True))

    def copy(self, values: list[int], into: Tensor) -> None:
        """To the beginning of an int64 tensor on the device."""
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        into[: len(values)].copy_(host, non_blocking=True)


def as_bits(values: list[float]) -> np.ndarray:
    """Floats in an int64 array: `tensor.view(torch.float64)` gives them back on the device."""
    return np.array(values, np.float64).view(np.int64)
