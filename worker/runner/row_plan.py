"""What the host knows about the rows that are sampled together, worked out once for as long as they stay the same.

Decoding rows change only when a sequence comes or goes, so in most steps nothing is looked at row by row: the step's
work is decided by the plan and carried out by tensor operations over all rows at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.kernels.transfer import to_device
from worker.runner.slots import Binding, SlotState

GREEDY_TEMPERATURE = 1e-5
"""Below this a draw would be the most likely token anyway, up to overflow of logits / temperature."""
NO_TOKEN = -1
"""In `BadTokens.beginnings`: a place that matches anything."""


@dataclass(frozen=True, slots=True)
class Places:
    """Elements of the rows' logits [R, V], as indices into the flat tensor: row × V + token. int64 [E]."""

    flat: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class BadTokens:
    """For each bad sequence of each row: the token that would complete it, and the tokens before that."""

    places: Places
    """[B]: the last token."""
    beginnings: Tensor
    """int32 [B, most]: the tokens before it, at the right end; NO_TOKEN in front."""
    lengths: Tensor
    """int64 [B]: tokens of the whole."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes of the logits before a token is chosen. None: no row asks for that."""

    bias: tuple[Places, Tensor] | None
    """Places and what is added there, float32 [E]."""
    penalised: Tensor | None
    """int64 [P]: rows with penalties."""
    has_repetition: bool
    has_output_penalties: bool
    """Presence or frequency."""
    allowed: tuple[Tensor, Places] | None
    """Rows that are restricted, int64; the places that stay in them."""
    banned: Places | None
    early: tuple[Places, Tensor] | None
    """Ending tokens, and the position from which each may come, int64 [E]."""
    bad: BadTokens | None


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows whose log probabilities are asked for."""

    rows: Tensor | None
    """int64; None for all rows."""
    indices: list[int]
    """The same on the host."""
    numbers: list[int]
    """Of each: how many most likely tokens."""

    @property
    def most(self) -> int:
        return max(self.numbers)


@dataclass(frozen=True, slots=True)
class RowPlan:
    num_rows: int
    drawn: Tensor | None
    """int64: rows whose token is drawn, the others being greedy; None for all rows."""
    num_drawn: int
    most_top_k: int
    """Largest top_k of a drawn row that is below the vocabulary's size; 0: none restricts anything."""
    has_top_p: bool
    has_top_k_with_top_p: bool
    """Every drawn row with a top_p has a top_k, too."""
    has_min_p: bool
    edits: LogitEdits | None
    logprobs: LogprobRows | None


def make_plan(bindings: Sequence[Binding], vocab_size: int, device: torch.device) -> RowPlan:
    """`bindings` are those of the sampled rows, in the order of the logits."""
    params = [binding.sampling for binding in bindings]
    drawn = [i for i, p in enumerate(params) if p.temperature >= GREEDY_TEMPERATURE]
    asking = [i for i, p in enumerate(params) if p.num_logprobs is not None]
    return RowPlan(
        num_rows=len(params),
        drawn=None if len(drawn) == len(params) else _index(drawn, device),
        num_drawn=len(drawn),
        most_top_k=max((params[i].top_k for i in drawn if params[i].top_k < vocab_size), default=0),
        has_top_p=any(params[i].top_p < 1 for i in drawn),
        has_top_k_with_top_p=all(0 < params[i].top_k < vocab_size for i in drawn if params[i].top_p < 1),
        has_min_p=any(params[i].min_p > 0 for i in drawn),
        edits=_make_edits(bindings, vocab_size, device),
        logprobs=LogprobRows(
            rows=None if len(asking) == len(params) else _index(asking, device),
            indices=asking,
            numbers=[min(params[i].num_logprobs or 0, vocab_size) for i in asking],
        )
        if asking
        else None,
    )


def _make_edits(bindings: Sequence[Binding], vocab_size: int, device: torch.device) -> LogitEdits | None:
    """A token beyond the vocabulary can never come, and its place would lie in the next row: it is left out. Nobody
    should send one; what has a value beside it is filtered here, plain lists in `places`."""
    params = [binding.sampling for binding in bindings]

    def places(lists: Iterable[tuple[int, Sequence[int]]]) -> Places:
        """Of each row, a list of tokens: it may be as long as the vocabulary."""
        row_indices, token_lists = zip(*lists, strict=True)
        rows = np.repeat(np.array(row_indices, np.int64), [len(tokens) for tokens in token_lists])
        tokens = np.concatenate([np.array(tokens, np.int64) for tokens in token_lists])
        known = tokens < vocab_size
        rows, tokens = rows[known], tokens[known]
        return Places(
            to_device(torch.from_numpy(rows * vocab_size + tokens), device), to_device(torch.from_numpy(rows), device)
        )

    bias = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias if token < vocab_size]
    penalised = [i for i, p in enumerate(params) if p.has_penalties]
    allowed = [(i, p.allowed_token_ids) for i, p in enumerate(params) if p.allowed_token_ids]
    # A bad sequence of one token is a banned one.
    banned = [(i, p.banned_token_ids) for i, p in enumerate(params) if p.banned_token_ids]
    banned += [(i, bad) for i, p in enumerate(params) for bad in p.bad_token_sequences if len(bad) == 1]
    early = [(i, t, b.min_length) for i, b in enumerate(bindings) for t in b.ending_token_ids if t < vocab_size]
    bad = [(i, bad) for i, p in enumerate(params) for bad in p.bad_token_sequences if len(bad) > 1]
    bad = [(i, ids) for i, ids in bad if ids[-1] < vocab_size]
    if not (bias or penalised or allowed or banned or early or bad):
        return None
    return LogitEdits(
        bias=(places((i, (token,)) for i, token, _ in bias), _floats([v for *_, v in bias], device)) if bias else None,
        penalised=_index(penalised, device) if penalised else None,
        has_repetition=any(p.repetition_penalty != 1 for p in params),
        has_output_penalties=any(p.presence_penalty or p.frequency_penalty for p in params),
        allowed=(_index([i for i, _ in allowed], device), places(allowed)) if allowed else None,
        banned=places(banned) if banned else None,
        early=(places((i, (token,)) for i, token, _ in early), _index([at for *_, at in early], device))
        if early
        else None,
        bad=_bad_tokens(bad, places((i, ids[-1:]) for i, ids in bad), device) if bad else None,
    )


def _bad_tokens(bad: list[tuple[int, tuple[int, ...]]], places: Places, device: torch.device) -> BadTokens:
    most = max(len(ids) for _, ids in bad) - 1
    beginnings = [[NO_TOKEN] * (most + 1 - len(ids)) + list(ids[:-1]) for _, ids in bad]
    return BadTokens(
        places=places,
        beginnings=to_device(torch.tensor(beginnings, dtype=torch.int32), device),
        lengths=_index([len(ids) for _, ids in bad], device),
    )


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.float32), device)


class PlanCache:
    """The plan of the last step's rows, as long as they are the next step's, too."""

    def __init__(self, slots: SlotState, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._key: tuple[int, int, list[int]] | None = None
        self._plan: RowPlan | None = None

    def plan(self, slots: list[int], vocab_size: int) -> RowPlan:
        """For the sampled rows, which belong to these slots."""
        key = (self._slots.version, vocab_size, slots)
        if self._plan is None or key != self._key:
            self._plan = make_plan([self._slots.bindings[slot] for slot in slots], vocab_size, self._device)
            self._key = key
        return self._plan
