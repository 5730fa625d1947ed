"""How many programs share the keys of a row, so that few rows fill the device and long ones do not hold up the others.

Every row has `usual` splits, by the number of rows alone. Where that leaves long rows whole, a few extra programs are
dealt out to them on the device, in the order of the rows: a launch that is the same for all lengths can be captured.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton.machine import Machine

LONG = 2048
"""Keys that a program may have for itself before a row wants more of them."""
SHORT = 256
"""Keys that are not worth a split of their own in a chunk."""
MAX_SPLITS = 64
RESIDENT = 4
"""Programs that a multiprocessor runs at a time, if they are small."""
ROWS = 1024
"""That the kernel counts at a time."""


@dataclass(frozen=True, slots=True)
class Splits:
    usual: int
    """A power of two."""
    is_uniform: bool = False
    """Of a step's uniform rows, where the host knows no lengths."""
    num_extra: int = 0
    """Programs beyond the usual ones; most have nothing to do."""
    by_row: Tensor | None = None
    """int32 [R]: how many each row has; None without extra ones."""
    first_extra: Tensor | None = None
    """int32 [R]: the first that is a row's."""
    extra_rows: Tensor | None = None
    """int32 [1 + num_extra]: how many have a row, then their rows."""

    @property
    def is_extra_only(self) -> bool:
        """A row without extra programs is whole."""
        return self.usual == 1 and self.num_extra > 0

    @property
    def most(self) -> int:
        """That a row can have, a power of two."""
        return MAX_SPLITS if self.num_extra else self.usual


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "usual", "num_extra"],
    do_not_specialize_on_alignment=["by_row", "first_extra", "extra_rows"],
)
def _deal_kernel(
    context_lens, by_row, first_extra, extra_rows, num_rows, num_tokens, usual, num_extra,
    WINDOW: tl.constexpr, LONG: tl.constexpr, MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dealt = 0
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < num_rows
        num_keys = tl.load(context_lens + row, mask=is_row, other=0)
        if WINDOW > 0:
            num_keys = tl.minimum(num_keys, WINDOW + num_tokens)
        wanted = tl.maximum(tl.minimum(tl.cdiv(num_keys, LONG), MAX_SPLITS) - usual, 0)
        begin = dealt + tl.cumsum(wanted, 0) - wanted
        given = tl.maximum(tl.minimum(wanted, num_extra - begin), 0)
        tl.store(by_row + row, usual + given, mask=is_row)
        tl.store(first_extra + row, begin, mask=is_row)
        for i in range(tl.max(given, 0)):
            tl.store(extra_rows + 1 + begin + i, row, mask=i < given)
        dealt += tl.sum(wanted, 0)
    tl.store(extra_rows, tl.minimum(dealt, num_extra))


def usual_splits(machine: Machine, num_programs: int, resident: int = RESIDENT) -> int:
    """A power of two: as many programs as the device runs at a time, `resident` on a multiprocessor, from so many that
    have a row and head each."""
    wanted = max(1, min(MAX_SPLITS, resident * machine.num_sms // num_programs))
    return 1 << (wanted.bit_length() - 1)


def deal_splits(
    machine: Machine, num_kv_heads: int, context_lens: Tensor, num_tokens: int, max_context_len: int,
    window: int | None = None, resident: int = RESIDENT,
) -> Splits:  # fmt: skip
    """For rows of `num_tokens` tokens each, each of which has `num_kv_heads` programs for all of its keys.
    `max_context_len` bounds their contexts [R] in every step."""
    num_rows = len(context_lens)
    usual = usual_splits(machine, num_rows * num_kv_heads, resident)
    most_keys = max_context_len if window is None else min(max_context_len, window + num_tokens)
    if usual * LONG >= most_keys:
        return Splits(usual, is_uniform=True)
    num_extra = max(1, resident * machine.num_sms // 2 // num_kv_heads)
    sizes = (num_rows, num_rows, 1 + num_extra)
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=context_lens.device)
    by_row, first_extra, extra_rows = buffer.split(sizes)
    _deal_kernel[(1,)](
        context_lens, by_row, first_extra, extra_rows, num_rows, num_tokens, usual, num_extra,
        window or 0, LONG, MAX_SPLITS, ROWS, num_warps=4,
    )  # fmt: skip
    return Splits(usual, True, num_extra, by_row, first_extra, extra_rows)


def chunk_splits(machine: Machine, num_tiles: int, longest: int) -> Splits:
    """For chunks in so many tiles, with contexts of at most `longest`: so that few tokens behind a long prefix fill the
    device."""
    wanted = min(2 * machine.num_sms // num_tiles, longest // SHORT, MAX_SPLITS)
    return Splits(1 << (max(1, wanted).bit_length() - 1))
