"""Phase 3 of a step: from logits to tokens. No host sync, no loop over rows, no state.

A row's draw depends on its logits, its parameters, its seed and the position of the new token alone, so it is the same
alone or in any batch. Truncation (top-k, then top-p, then min-p, each over what the one before left) comes down to one
threshold on a row's logits; tokens that tie with the threshold stay.

The draw is an exponential race: argmax of weight / E with E ~ Exp(1) picks each token with its probability. It is run
twice, first over the sums of chunks of the vocabulary, then over the chosen chunk's tokens, which is the same
distribution at 1 / 100 of the random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.core.params import SamplingParams
from worker.kernels.interface import KernelBackend
from worker.kernels.transfer import to_device
from worker.runner.slots import GREEDY_TEMPERATURE

CHUNK = 256
CPU_CANDIDATES = (256, 4096)
"""How many of the best tokens are looked at, in turn, before all of the vocabulary is sorted."""
FAILED = -1
"""In place of a token id: the row's logits were not finite."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the sampled rows; the tensors are on the device, aligned with the logits' rows."""

    params: Sequence[SamplingParams]
    """The same on the host: it decides what is computed at all."""
    integers: Tensor
    """int64 [R, 2]: top_k (0 for all), seed."""
    floats: Tensor
    """float64 [R, 3]: temperature, top_p, min_p."""
    positions: Tensor
    """int64 [R]: position of the token to be sampled."""


class Sampler:
    def __init__(self, kernels: KernelBackend) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Token ids, int64 [R]; FAILED where a row holds a NaN, +inf or nothing but −inf. logits: float32 [R, V]."""
        best, ids = logits.max(-1)
        drawn_rows = [i for i, p in enumerate(rows.params) if p.temperature >= GREEDY_TEMPERATURE]
        if len(drawn_rows) == len(rows.params) > 0:
            ids = self._draw(logits, best, rows)
        elif drawn_rows:
            index = to_device(torch.tensor(drawn_rows), logits.device)
            subset = SamplingRows(
                [rows.params[i] for i in drawn_rows],
                rows.integers[index], rows.floats[index], rows.positions[index],
            )  # fmt: skip
            ids = ids.index_copy(0, index, self._draw(logits[index], best[index], subset))
        return torch.where(best.isfinite(), ids, FAILED)

    def _draw(self, logits: Tensor, best: Tensor, rows: SamplingRows) -> Tensor:
        temperature = rows.floats[:, :1].float()
        scaled = (logits - best[:, None]) / temperature
        weights = scaled.exp()
        threshold = self._threshold(scaled, weights, rows)
        if threshold is not None:
            weights = weights.masked_fill_(scaled < threshold, 0)
        return self._race(weights, rows)

    def _threshold(self, scaled: Tensor, weights: Tensor, rows: SamplingRows) -> Tensor | None:
        """[R, 1]: the least scaled logit that stays, −inf where all do; None when no row truncates."""
        found: Tensor | None = None
        if most := max(p.top_k if p.top_k < scaled.shape[1] else 0 for p in rows.params):
            found = _top_k_threshold(scaled, rows, most)
        if any(p.top_p < 1 for p in rows.params):
            if found is not None:
                weights = weights.masked_fill(scaled < found, 0)
            top_p = _top_p_threshold(scaled, weights, rows)
            found = top_p if found is None else torch.maximum(found, top_p)
        if any(p.min_p for p in rows.params):
            min_p = rows.floats[:, 2:].log().float()
            found = min_p if found is None else torch.maximum(found, min_p)
        return found

    def _race(self, weights: Tensor, rows: SamplingRows) -> Tensor:
        num_rows, vocab_size = weights.shape
        if vocab_size % CHUNK:
            weights = functional.pad(weights, (0, CHUNK - vocab_size % CHUNK))
        chunks = weights.view(num_rows, -1, CHUNK)
        sums = chunks.sum(-1)
        chunk = self._winner(sums, rows, stream=0)
        members = chunks.gather(1, chunk[:, None, None].expand(-1, 1, CHUNK))[:, 0]
        return chunk * CHUNK + self._winner(members, rows, stream=1)

    def _winner(self, weights: Tensor, rows: SamplingRows, stream: int) -> Tensor:
        uniform = self._kernels.random_uniform(rows.integers[:, 1], rows.positions, stream, weights.shape[1])
        return (weights.double() / -uniform.log()).argmax(-1)


def _top_k_threshold(scaled: Tensor, rows: SamplingRows, most: int) -> Tensor:
    """The top_k-th largest logit. A top_k of the vocabulary's size or more restricts nothing, as 0 does."""
    top_k = rows.integers[:, :1]
    kth = scaled.topk(most).values.gather(1, (top_k - 1).clamp_(0, most - 1))
    return kth.masked_fill_((top_k == 0) | (top_k >= scaled.shape[1]), -torch.inf)


def _top_p_threshold(scaled: Tensor, weights: Tensor, rows: SamplingRows) -> Tensor:
    """The least logit of the smallest set of most likely tokens that holds a share top_p of `weights`."""
    top_p = rows.floats[:, 1:2]
    goal = top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    values, before = _sorted_mass(scaled, weights, goal, top_p)
    # The most likely token always stays, whatever top_p.
    num_kept = (before < goal).sum(-1, keepdim=True).clamp_(min=1)
    threshold = values.gather(1, num_kept - 1)
    return threshold.masked_fill_(top_p >= 1, -torch.inf)


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
