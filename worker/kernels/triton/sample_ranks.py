"""The best token of a vocabulary that ranks share: each sends the best of its part to all others (`messages`), so that
no logits are gathered, and nobody is told of a choice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.sampling import CHUNK, FAILED, BestOfRanksKernel
from worker.kernels.step import SlotTables
from worker.kernels.triton.machine import Machine
from worker.kernels.triton.messages import addresses_of, ask, complete, send
from worker.kernels.triton.overlap import launch_options, let_next_begin, wait_for_kernel_before
from worker.kernels.triton.prepare import keep_token
from worker.kernels.triton.sample import chunk_stats
from worker.kernels.triton.sample_parts import load_logits
from worker.parallel.symmetric import Inboxes

_CHUNK = tl.constexpr(CHUNK)
_FAILED = tl.constexpr(FAILED)


@triton.jit
def _best_of_ranks_kernel(
    logits, chunk_best, inboxes, turns, slots, positions, out, tokens, lengths, first_token, stride, num_tokens,
    num_chunks, message_stride, tokens_stride,
    PAD: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program a row. A message is the best logit's bits, and its token: the first of equals, of the first rank."""
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    chunk, member, word = tl.arange(0, PAD), tl.arange(0, _CHUNK), tl.arange(0, 2)
    bests = tl.load(chunk_best + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    own_best = tl.max(bests)
    place = tl.min(tl.where(bests == own_best, chunk, PAD)) * _CHUNK + member
    is_best = load_logits(logits + row * stride, place, place < num_tokens) == own_best
    own_token = first_token + tl.min(tl.where(is_best, place, num_tokens))
    own = tl.where(word == 0, own_best.to(tl.int32, bitcast=True), own_token)

    turn = tl.load(turns + row)
    addresses = addresses_of(inboxes, SIZE)
    inside = word < 2
    send(own, row, word, inside, turn, addresses, message_stride, RANK, SIZE, False)
    ours = addresses[RANK] + (row * 2 + turn) * SIZE * message_stride
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for rank in tl.static_range(SIZE):
        found = own
        if rank != RANK:
            message = ours + rank * message_stride
            found = complete(ask(message, word, inside), message, word, inside)
        rank_best = tl.sum(tl.where(word == 0, found, 0)).to(tl.float32, bitcast=True)
        token = tl.where(rank_best > best, tl.sum(tl.where(word == 1, found, 0)), token)
        best = tl.maximum(best, rank_best)
    tl.store(turns + row, 1 - turn)
    chosen = tl.where(tl.abs(best) < float("inf"), token, _FAILED).to(tl.int64)
    tl.store(out + row, chosen)
    keep_token(tokens, lengths, tl.load(slots + row), tl.load(positions + row), chosen, tokens_stride, True)


class TritonBestOfRanks(BestOfRanksKernel):
    def __init__(self, machine: Machine) -> None:
        self._overlaps = machine.can_overlap

    def __call__(
        self, logits: Tensor, first_token: int, inboxes: Inboxes, slots: Tensor, positions: Tensor,
        remembered: SlotTables,
    ) -> Tensor:  # fmt: skip
        num_rows, num_tokens = logits.shape
        best, _ = chunk_stats(logits, None, num_rows, None, has_mass=False, overlaps=self._overlaps)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        _best_of_ranks_kernel[(num_rows,)](
            logits, best, inboxes.addresses, inboxes.turns, slots, positions, token_ids, remembered.tokens,
            remembered.lengths, first_token, logits.stride(0), num_tokens, best.shape[1], inboxes.num_words,
            remembered.tokens.stride(0), triton.next_power_of_2(best.shape[1]), inboxes.rank,
            len(inboxes.addresses), self._overlaps, num_warps=4, **launch_options(self._overlaps),
        )  # fmt: skip
        return token_ids
