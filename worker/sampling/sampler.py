"""Phase 3 of a step: from logits to tokens. No host sync, no loop over rows, no state.

A row's draw depends on its logits, its parameters, its seed and the position of the new token alone, so it is the same
alone or in any batch. Truncation (top-k, then top-p, then min-p, each over what the one before left) comes down to one
threshold on a row's logits; tokens that tie with the threshold stay.

The draw is an exponential race: argmax of weight / E with E ~ Exp(1) picks each token with its probability. It is run
twice, first over the sums of chunks of the vocabulary, then over the chosen chunk's tokens, which is the same
distribution at 1 / 100 of the random numbers.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.interface import RANDOM_UNIFORM
from worker.kernels.select import Kernels
from worker.sampling.edits import History, edit_logits
from worker.sampling.logprobs import LogprobTensors, token_logprobs
from worker.sampling.parameters import Parameters
from worker.sampling.plan import RowPlan

CHUNK = 256
CPU_CANDIDATES = (256, 4096)
"""How many of the best tokens are looked at, in turn, before all of the vocabulary is sorted."""
FAILED = -1
"""In place of a token id: the row's logits were not finite."""
NOTHING_ALLOWED = -2
"""In place of a token id: the request's own rules leave no token."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows to sample; tensors are on the device, aligned with the logits' rows."""

    plan: RowPlan
    parameters: Parameters
    history: History
    grammar_mask: Tensor | None = None
    """int32 [R, V / 32 rounded up]: a bit for each token that the row's grammar allows; None: no row has one."""

    def drawn(self) -> "DrawnRows":
        index = self.plan.drawn
        if index is None:
            return DrawnRows(self.plan, self.parameters, self.history.positions)
        return DrawnRows(self.plan, self.parameters.select(index), self.history.positions.index_select(0, index))


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Of these rows, those that are drawn."""

    plan: RowPlan
    parameters: Parameters
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: Tensor
    """int64 [R]; FAILED or NOTHING_ALLOWED where there is no token."""
    logprobs: LogprobTensors | None
    """Of the rows of `plan.logprobs`."""


class Sampler:
    def __init__(self, kernels: Kernels) -> None:
        self._random_uniform = kernels.choose(RANDOM_UNIFORM, None, torch.float64)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """Chooses a token for each row. logits: float32 [R, V], contiguous; may be overwritten."""
        plan = rows.plan
        asking = plan.logprobs
        best = logits.amax(-1)
        is_finite = best.isfinite()
        model_logprobs = None
        if asking is not None:
            # Before any edit: they are the model's own.
            asked = logits if asking.rows is None else logits.index_select(0, asking.rows)
            model_logprobs = asked.log_softmax(-1)
        has_edits = plan.edits is not None or rows.grammar_mask is not None
        if has_edits:
            self._edit(logits, rows)
            best = logits.amax(-1)
        ids = self._choose(logits, best, rows)
        ids = torch.where(best.isfinite(), ids, NOTHING_ALLOWED) if has_edits else ids
        ids = torch.where(is_finite, ids, FAILED)
        if asking is None or model_logprobs is None:
            return Sampled(ids, None)
        chosen = ids if asking.rows is None else ids.index_select(0, asking.rows)
        return Sampled(ids, token_logprobs(model_logprobs, chosen, asking.most))

    def _edit(self, logits: Tensor, rows: SamplingRows) -> None:
        if rows.plan.edits is not None:
            edit_logits(logits, rows.plan.edits, rows.history, rows.parameters)
        if rows.grammar_mask is not None:
            apply_mask(logits, rows.grammar_mask)

    def _choose(self, logits: Tensor, best: Tensor, rows: SamplingRows) -> Tensor:
        plan = rows.plan
        if plan.num_drawn == 0:
            return logits.argmax(-1)
        if plan.drawn is None:
            return self._draw(logits, best, rows.drawn())
        drawn = self._draw(logits.index_select(0, plan.drawn), best.index_select(0, plan.drawn), rows.drawn())
        return logits.argmax(-1).index_copy_(0, plan.drawn, drawn)

    def _draw(self, logits: Tensor, best: Tensor, rows: DrawnRows) -> Tensor:
        temperature = rows.parameters.temperature.float()
        scaled = (logits - best[:, None]).div_(temperature)
        # Not exp: that is slow for what is as good as zero.
        weights = scaled.softmax(-1)
        threshold = self._threshold(scaled, weights, rows)
        if threshold is not None:
            weights = weights.masked_fill_(scaled < threshold, 0)
        return self._race(weights, rows)

    def _threshold(self, scaled: Tensor, weights: Tensor, rows: DrawnRows) -> Tensor | None:
        """[R, 1]: the least scaled logit that stays, −inf where all do; None when no row truncates."""
        plan = rows.plan
        found: Tensor | None = None
        values: Tensor | None = None
        if plan.most_top_k:
            values = scaled.topk(plan.most_top_k).values
            found = _top_k_threshold(values, rows, scaled.shape[1])
        if plan.has_top_p:
            if values is not None and found is not None and plan.has_top_k_with_top_p:
                top_p = _top_p_of_best(values.masked_fill(values < found, -torch.inf), rows)
            else:
                kept = weights if found is None else weights.masked_fill(scaled < found, 0)
                top_p = _top_p_threshold(scaled, kept, rows)
            found = top_p if found is None else torch.maximum(found, top_p)
        if plan.has_min_p:
            min_p = rows.parameters.min_p.log().float()
            found = min_p if found is None else torch.maximum(found, min_p)
        return found

    def _race(self, weights: Tensor, rows: DrawnRows) -> Tensor:
        num_rows, vocab_size = weights.shape
        if vocab_size % CHUNK:
            weights = functional.pad(weights, (0, CHUNK - vocab_size % CHUNK))
        chunks = weights.view(num_rows, -1, CHUNK)
        sums = chunks.sum(-1)
        chunk = self._winner(sums, rows, stream=0)
        members = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CHUNK))[:, 0]
        return chunk * CHUNK + self._winner(members, rows, stream=1)

    def _winner(self, weights: Tensor, rows: DrawnRows, stream: int) -> Tensor:
        uniform = self._random_uniform(rows.parameters.seed[:, 0], rows.positions, stream, weights.shape[1])
        return (weights.double() / -uniform.log()).argmax(-1)


def _top_k_threshold(values: Tensor, rows: DrawnRows, vocab_size: int) -> Tensor:
    """The top_k-th of the largest logits in order, `values`. A top_k of the vocabulary's size or more restricts
    nothing, as 0 does."""
    top_k = rows.parameters.top_k
    kth = values.gather(1, (top_k - 1).clamp_(0, values.shape[1] - 1))
    return kth.masked_fill_((top_k == 0) | (top_k >= vocab_size), -torch.inf)


def _top_p_of_best(values: Tensor, rows: DrawnRows) -> Tensor:
    """As `_top_p_threshold`, for rows whose top_k left no more than these largest logits, in falling order."""
    mass = values.exp().double()
    total = mass.cumsum(-1)
    return _last_before_goal(values, total - mass, total[:, -1:], rows)


def _top_p_threshold(scaled: Tensor, weights: Tensor, rows: DrawnRows) -> Tensor:
    """The least logit of the smallest set of most likely tokens that holds a share top_p of `weights`."""
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    top_p = rows.parameters.top_p
    values, before = _sorted_mass(scaled, weights, top_p * total, top_p)
    return _last_before_goal(values, before, total, rows)


def _last_before_goal(values: Tensor, before: Tensor, total: Tensor, rows: DrawnRows) -> Tensor:
    """`before` [R, N] is the mass of what is more likely than each of `values`."""
    top_p = rows.parameters.top_p
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


def apply_mask(logits: Tensor, mask: Tensor) -> None:
    """−inf in place, in float32 [R, V], for each token whose bit in `mask` int32 [R, V / 32 rounded up] is not set."""
    table = _penalty_of_byte(logits.device)
    penalty = table.index_select(0, mask.view(torch.uint8).view(-1).int()).view(len(logits), -1)
    logits.add_(penalty[:, : logits.shape[1]])


@cache
def _penalty_of_byte(device: torch.device) -> Tensor:
    """float32 [256, 8]: 0 for each set bit of a byte, lowest first, −inf for the others."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf)
