"""Makes the rules of the rows that are sampled together.

A sequence's part is worked out once, when its slot is bound (`SlotRules.bind`). The rules of a step's rows put the
parts together; they are made anew when the rows change, which they do when a sequence comes or goes, and a newcomer
costs its own row only. The step's work is then a fixed number of operations over all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.core.batch import NewSequence
from worker.core.params import SamplingParams
from worker.kernels.sampling import GREEDY_TEMPERATURE, DrawRules
from worker.kernels.transfer import to_device
from worker.sampling.row_rules import (
    NO_TOKEN,
    BadTokens,
    EditedRows,
    LogitEdits,
    LogprobRows,
    Places,
    RowGroup,
    RowRules,
)  # fmt: skip

NO_LOGPROBS = -1
MAX_KEPT = 16
"""Rules of so many sets of rows: the passes of a draft model ask for others than its step does."""

Ids = np.ndarray
"""int64 [N]: token ids, all in the vocabulary."""


@dataclass(frozen=True, slots=True)
class _Edits:
    """One sequence's lists. A token beyond the vocabulary can never come, and its place would lie in the next row:
    nobody should send one, and here it is left out."""

    bias: Ids
    bias_values: np.ndarray
    """float32, of each."""
    endings: Ids
    """Must not come before position `min_length`."""
    min_length: int
    bad: tuple[tuple[int, ...], ...]
    """Sequences of two and more tokens."""


class SlotRules:
    """Each slot's rules. Flags are arrays over all slots, so that those of a step's rows are found in one go."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device

        def flags() -> np.ndarray:
            return np.zeros(num_slots, bool)

        self._is_drawn, self._has_top_p, self._has_min_p, self._has_edits = flags(), flags(), flags(), flags()
        self._is_edited, self._is_restricted = flags(), flags()
        """By whatever: lists, penalties, a grammar; by lists of allowed or banned tokens."""
        self._is_penalised, self._has_repetition, self._has_output_penalties = flags(), flags(), flags()
        self._top_k = np.zeros(num_slots, np.int64)
        """0 where it restricts nothing."""
        self._num_logprobs = np.full(num_slots, NO_LOGPROBS)
        self._edits: dict[int, _Edits] = {}
        self._made: dict[tuple[int, ...], RowRules] = {}
        """By slots, of the rows that were asked for since one was bound."""

    def bind(self, new: NewSequence) -> None:
        """The slot belongs to `new` from now on."""
        slot, params = new.slot, new.sampling
        self._made.clear()
        self._is_drawn[slot] = params.temperature >= GREEDY_TEMPERATURE
        self._top_k[slot] = params.top_k if params.top_k < self._vocab_size else 0
        self._has_top_p[slot] = params.top_p < 1
        self._has_min_p[slot] = params.min_p > 0
        self._is_penalised[slot] = params.has_penalties
        self._has_repetition[slot] = params.repetition_penalty != 1
        self._has_output_penalties[slot] = bool(params.presence_penalty or params.frequency_penalty)
        self._num_logprobs[slot] = (
            NO_LOGPROBS if params.num_logprobs is None else min(params.num_logprobs, self._vocab_size)
        )
        edits = self._edits_of(new)
        self._has_edits[slot] = edits is not None
        if edits is None:
            self._edits.pop(slot, None)
        else:
            self._edits[slot] = edits
        self._is_restricted[slot] = is_restricted(params)
        self._is_edited[slot] = (
            edits is not None or params.has_penalties or params.grammar is not None or is_restricted(params)
        )

    def _edits_of(self, new: NewSequence) -> _Edits | None:
        params: SamplingParams = new.sampling
        if not (params.logit_bias or params.bad_token_sequences or new.ending_token_ids):
            return None
        bias = np.array([token for token, _ in params.logit_bias], np.int64)
        values = np.array([value for _, value in params.logit_bias], np.float32)
        return _Edits(
            bias=bias[bias < self._vocab_size],
            bias_values=values[bias < self._vocab_size],
            endings=self._known(new.ending_token_ids),
            min_length=new.min_length,
            bad=tuple(ids for ids in params.bad_token_sequences if len(ids) > 1 and ids[-1] < self._vocab_size),
        )

    def _known(self, token_ids: Sequence[int]) -> Ids:
        ids = np.array(token_ids, np.int64)
        return ids[ids < self._vocab_size]

    def of(self, slots: list[int]) -> RowRules:
        """Of the sampled rows, which belong to these slots. The same again while nothing changes."""
        key = tuple(slots)
        found = self._made.get(key)
        if found is None:
            if len(self._made) == MAX_KEPT:
                self._made.clear()
            found = self._made[key] = self._make(np.array(slots, np.int64))
        return found

    def _make(self, slots: np.ndarray) -> RowRules:
        is_edited = self._is_edited[slots]
        plain, edited = (~is_edited).nonzero()[0], is_edited.nonzero()[0]
        return RowRules(
            num_rows=len(slots),
            plain=self._group(slots, plain) if len(plain) else None,
            edited=EditedRows(
                group=self._group(slots, edited),
                edits=self._make_edits(slots[edited]),
                is_restricted=bool(self._is_restricted[slots[edited]].any()),
            )
            if len(edited)
            else None,
            logprobs=self._logprob_rows(slots),
        )

    def _group(self, slots: np.ndarray, rows: np.ndarray) -> RowGroup:
        slots_of = slots[rows]
        drawn = self._is_drawn[slots_of].nonzero()[0]
        top_k, has_top_p = self._top_k[slots_of[drawn]], self._has_top_p[slots_of[drawn]]
        draws = DrawRules(
            num_drawn=len(drawn),
            drawn=None if len(drawn) == len(rows) else self._to_device(drawn),
            most_top_k=int(top_k.max(initial=0)),
            has_top_p=bool(has_top_p.any()),
            has_top_k_with_top_p=bool((top_k[has_top_p] > 0).all()),
            has_min_p=bool(self._has_min_p[slots_of[drawn]].any()),
        )
        return RowGroup(None if len(rows) == len(slots) else self._to_device(rows), len(rows), draws)

    def _logprob_rows(self, slots: np.ndarray) -> LogprobRows | None:
        numbers = self._num_logprobs[slots]
        asking = (numbers != NO_LOGPROBS).nonzero()[0]
        if not len(asking):
            return None
        rows = None if len(asking) == len(slots) else self._to_device(asking)
        return LogprobRows(rows, asking.tolist(), numbers[asking].tolist())

    def _make_edits(self, slots: np.ndarray) -> LogitEdits:
        penalised = self._is_penalised[slots].nonzero()[0]
        edited = [(int(row), self._edits[int(slots[row])]) for row in self._has_edits[slots].nonzero()[0]]
        bias, early = self._places(edited, lambda e: e.bias), self._places(edited, lambda e: e.endings)
        bad = [(row, ids) for row, edits in edited for ids in edits.bad]
        return LogitEdits(
            bias=None if bias is None else (bias, self._to_device(np.concatenate([e.bias_values for _, e in edited]))),
            penalised=self._to_device(penalised) if len(penalised) else None,
            has_repetition=bool(self._has_repetition[slots].any()),
            has_output_penalties=bool(self._has_output_penalties[slots].any()),
            early=None if early is None else (early, self._to_device(_min_lengths(edited))),
            bad=self._bad_tokens(bad) if bad else None,
        )

    def _places(self, edited: list[tuple[int, _Edits]], ids_of: Callable[[_Edits], Ids]) -> Places | None:
        """Of each row, a list of tokens. None where all are empty."""
        lists = [ids_of(edits) for _, edits in edited]
        rows = np.repeat(np.array([row for row, _ in edited], np.int64), [len(ids) for ids in lists])
        if not len(rows):
            return None
        flat = rows * self._vocab_size + np.concatenate(lists)
        return Places(self._to_device(flat), self._to_device(rows))

    def _bad_tokens(self, bad: list[tuple[int, tuple[int, ...]]]) -> BadTokens:
        rows = np.array([row for row, _ in bad], np.int64)
        flat = rows * self._vocab_size + np.array([ids[-1] for _, ids in bad], np.int64)
        most = max(len(ids) for _, ids in bad) - 1
        beginnings = [[NO_TOKEN] * (most + 1 - len(ids)) + list(ids[:-1]) for _, ids in bad]
        return BadTokens(
            places=Places(self._to_device(flat), self._to_device(rows)),
            beginnings=self._to_device(np.array(beginnings, np.int32)),
            lengths=self._to_device(np.array([len(ids) for _, ids in bad], np.int64)),
        )

    def _to_device(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def _min_lengths(edited: list[tuple[int, _Edits]]) -> np.ndarray:
    """int64, of each ending token of each row."""
    return np.repeat([edits.min_length for _, edits in edited], [len(edits.endings) for _, edits in edited])


def is_restricted(params: SamplingParams) -> bool:
    """It has a list of allowed or banned tokens, or a bad sequence of one token, which is a banned one."""
    return bool(
        params.allowed_token_ids or params.banned_token_ids or any(len(ids) == 1 for ids in params.bad_token_sequences)
    )


def allowed_bits(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """int32 [V / 32 rounded up]: a bit for each token that those lists leave."""
    num_words = -(-vocab_size // 32)
    is_allowed = np.full(num_words * 32, not params.allowed_token_ids)
    banned = [*params.banned_token_ids, *(ids[0] for ids in params.bad_token_sequences if len(ids) == 1)]
    for ids, value in ((params.allowed_token_ids, True), (banned, False)):
        known = np.array(ids or (), np.int64)
        is_allowed[known[known < vocab_size]] = value
    return np.packbits(is_allowed, bitorder="little").view(np.int32)
