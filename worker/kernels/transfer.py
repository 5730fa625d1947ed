"""Small tensors from the host to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """On a CPU the tensor itself. On a GPU a copy that nobody waits for: it starts from pinned memory, which torch's
    allocator does not hand out again before the copy is done."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [N] there."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)
