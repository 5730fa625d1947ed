"""Where the tokens of a row are in a paged cache."""

import torch
from torch import Tensor


def context_slots(tables: Tensor, length: int, block_size: int) -> Tensor:
    """int64 [rows, length]: where the first `length` tokens of each row are. `tables` int32 [rows, blocks]."""
    offsets = torch.arange(block_size, device=tables.device)
    slots = tables.long()[:, : -(-length // block_size), None] * block_size + offsets
    return slots.flatten(1)[:, :length]
