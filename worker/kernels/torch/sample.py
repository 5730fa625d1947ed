"""Choosing tokens in tensor operations: no loop over rows, no state."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.sampling import CHUNK, FAILED, DrawRules, Draws, Parameters
from worker.kernels.step import SlotTables
from worker.kernels.torch.prepare import remember
from worker.kernels.torch.random import random_uniform

CPU_CANDIDATES = (256, 4096)
"""How many of the best tokens are looked at, in turn, before all of the vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The rows that are drawn: their own parameters and positions."""

    rules: DrawRules
    parameters: Parameters
    positions: Tensor


def choose(
    logits: Tensor, rows: Tensor | None, draws: Draws, remembered: SlotTables | None = None, out: Tensor | None = None
) -> Tensor:
    """See `ChooseKernel`."""
    rules = draws.rules
    logits = logits[: len(draws.slots)] if rows is None else logits.index_select(0, rows)
    best = logits.amax(-1)
    if rules.num_drawn == 0:
        ids = logits.argmax(-1)
    elif rules.drawn is None:
        ids = _draw(logits, best, _Drawn(rules, draws.parameters.select(draws.slots), draws.positions))
    else:
        drawn = _Drawn(
            rules,
            draws.parameters.select(draws.slots.index_select(0, rules.drawn)),
            draws.positions.index_select(0, rules.drawn),
        )
        found = _draw(logits.index_select(0, rules.drawn), best.index_select(0, rules.drawn), drawn)
        ids = logits.argmax(-1).index_copy_(0, rules.drawn, found)
    ids = torch.where(best.isfinite(), ids, FAILED)
    if remembered is not None:
        remember(remembered, draws.slots, draws.positions, ids)
    return ids if out is None else out.copy_(ids, non_blocking=True)


def masked_copy(logits: Tensor, rows: Tensor | None, num_rows: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `MaskedCopyKernel`."""
    copy = (logits[:num_rows] if rows is None else logits.index_select(0, rows)).to(torch.float32, copy=True)
    is_finite = copy.amax(-1).isfinite()
    if mask is not None:
        _apply_mask(copy, mask)
    return copy, is_finite


def token_logprobs(logits: Tensor, rows: Tensor | None, token_ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `LogprobsKernel`."""
    logits = (logits[: len(token_ids)] if rows is None else logits.index_select(0, rows)).float()
    total = logits.logsumexp(-1, keepdim=True)
    chosen_ids = token_ids.clamp(min=0)[:, None]
    chosen = logits.gather(1, chosen_ids)
    rank = (logits > chosen).sum(-1, keepdim=True) + 1
    best = logits.topk(most)
    ranks = torch.arange(1, most + 1, device=logits.device).expand(len(logits), -1)
    return (
        torch.cat((chosen_ids, best.indices), 1),
        torch.cat((chosen, best.values), 1) - total,
        torch.cat((rank, ranks), 1),
    )


def _draw(logits: Tensor, best: Tensor, drawn: _Drawn) -> Tensor:
    temperature = drawn.parameters.temperature.float()
    scaled = (logits.float() - best.float()[:, None]).div_(temperature)
    # Not exp: that is slow for what is as good as zero.
    weights = scaled.softmax(-1)
    threshold = _threshold(scaled, weights, drawn)
    if threshold is not None:
        weights = weights.masked_fill_(scaled < threshold, 0)
    return _race(weights, drawn)


def _threshold(scaled: Tensor, weights: Tensor, drawn: _Drawn) -> Tensor | None:
    """[R, 1]: the least scaled logit that stays, −inf where all do; None when no row truncates."""
    rules = drawn.rules
    found: Tensor | None = None
    values: Tensor | None = None
    if rules.most_top_k:
        values = scaled.topk(rules.most_top_k).values
        found = _top_k_threshold(values, drawn, scaled.shape[1])
    if rules.has_top_p:
        if values is not None and found is not None and rules.has_top_k_with_top_p:
            top_p = _top_p_of_best(values.masked_fill(values < found, -torch.inf), drawn)
        else:
            kept = weights if found is None else weights.masked_fill(scaled < found, 0)
            top_p = _top_p_threshold(scaled, kept, drawn)
        found = top_p if found is None else torch.maximum(found, top_p)
    if rules.has_min_p:
        min_p = drawn.parameters.min_p.log().float()
        found = min_p if found is None else torch.maximum(found, min_p)
    return found


def _race(weights: Tensor, drawn: _Drawn) -> Tensor:
    num_rows, vocab_size = weights.shape
    if vocab_size % CHUNK:
        weights = functional.pad(weights, (0, CHUNK - vocab_size % CHUNK))
    chunks = weights.view(num_rows, -1, CHUNK)
    sums = chunks.sum(-1)
    chunk = _winner(sums, drawn, stream=0)
    members = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CHUNK))[:, 0]
    return chunk * CHUNK + _winner(members, drawn, stream=1)


def _winner(weights: Tensor, drawn: _Drawn, stream: int) -> Tensor:
    uniform = random_uniform(drawn.parameters.seed[:, 0], drawn.positions, stream, weights.shape[1])
    return (weights.double() / -uniform.log()).argmax(-1)


def _top_k_threshold(values: Tensor, drawn: _Drawn, vocab_size: int) -> Tensor:
    """The top_k-th of the largest logits in order, `values`. A top_k of the vocabulary's size or more restricts
    nothing, as 0 does."""
    top_k = drawn.parameters.top_k
    kth = values.gather(1, (top_k - 1).clamp_(0, values.shape[1] - 1))
    return kth.masked_fill_((top_k == 0) | (top_k >= vocab_size), -torch.inf)


def _top_p_of_best(values: Tensor, drawn: _Drawn) -> Tensor:
    """As `_top_p_threshold`, for rows whose top_k left no more than these largest logits, in falling order."""
    mass = values.exp().double()
    total = mass.cumsum(-1)
    return _last_before_goal(values, total - mass, total[:, -1:], drawn)


def _top_p_threshold(scaled: Tensor, weights: Tensor, drawn: _Drawn) -> Tensor:
    """The least logit of the smallest set of most likely tokens that holds a share top_p of `weights`."""
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    top_p = drawn.parameters.top_p
    values, before = _sorted_mass(scaled, weights, top_p * total, top_p)
    return _last_before_goal(values, before, total, drawn)


def _last_before_goal(values: Tensor, before: Tensor, total: Tensor, drawn: _Drawn) -> Tensor:
    """`before` [R, N] is the mass of what is more likely than each of `values`."""
    top_p = drawn.parameters.top_p
    # The most likely token always stays, whatever top_p.
    num_kept = (before < top_p * total).sum(-1, keepdim=True).clamp_(min=1)
    return values.gather(1, num_kept - 1).masked_fill_(top_p >= 1, -torch.inf)


def _sorted_mass(scaled: Tensor, weights: Tensor, goal: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in falling order, and the mass before each. As many as needed, at least.

    On a CPU the host may look at the values: a few hundred candidates nearly always hold the mass.
    """
    for num in CPU_CANDIDATES if scaled.device.type == "cpu" else ():
        if num >= scaled.shape[1]:
            break
        values, ids = scaled.topk(num)
        mass = weights.gather(1, ids).double()
        total = mass.cumsum(-1)
        if bool(((total[:, -1:] >= goal) | (top_p >= 1)).all()):
            return values, total - mass
    values, ids = scaled.sort(descending=True)
    mass = weights.gather(1, ids).double()
    return values, mass.cumsum(-1) - mass


def _apply_mask(logits: Tensor, mask: Tensor) -> None:
    table = _penalty_of_byte(logits.device)
    penalty = table.index_select(0, mask.view(torch.uint8).view(-1).int()).view(len(logits), -1)
    logits.add_(penalty[:, : logits.shape[1]])


@cache
def _penalty_of_byte(device: torch.device) -> Tensor:
    """float32 [256, 8]: 0 for each set bit of a byte, lowest first, −inf for the others."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf)
