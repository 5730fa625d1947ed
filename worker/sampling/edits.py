"""Changes of the logits before a token is chosen: bias, penalties, and what must not come.

In this order, as in `transformers`: bias; repetition penalty over prompt and output, then presence and frequency
penalty over the output; then −inf for endings that come too early and for tokens that would complete a bad sequence.
Tokens that lists or a grammar forbid are −inf from the start, and nothing here changes that. Everything is done in
place by a few operations over all rows together; tokens so far are read on the device, so a token that the host has
not seen counts, too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.kernels.sampling import Parameters
from worker.sampling.row_rules import NO_TOKEN, BadTokens, LogitEdits

MAX_HISTORY_ELEMENTS = 1 << 21
"""Tokens so far that are looked at together; more rows than that take turns, which bounds memory."""


class History(NamedTuple):
    """The tokens so far of R rows."""

    tokens: Tensor
    """int32 [slots, most]"""
    slots: Tensor
    """int64 [R]"""
    positions: Tensor
    """int64 [R]: of the token to come."""
    longest: int
    """Largest of `positions`, on the host, or more."""

    def select(self, rows: Tensor | None) -> "History":
        """Of these rows, int64; None for all."""
        if rows is None:
            return self
        return History(
            self.tokens, self.slots.index_select(0, rows), self.positions.index_select(0, rows), self.longest
        )


def edit_logits(logits: Tensor, edits: LogitEdits, history: History, parameters: Parameters) -> None:
    """Changes `logits` float32 [R, V], contiguous, in place. `parameters` are those of all slots."""
    flat = logits.view(-1)
    if edits.bias is not None:
        places, values = edits.bias
        flat.index_add_(0, places.flat, values)
    if edits.penalised is not None:
        for rows in edits.penalised.split(max(1, MAX_HISTORY_ELEMENTS // history.longest)):
            _penalise(logits, rows, edits, history, parameters.select(history.slots.index_select(0, rows)))
    if edits.early is not None:
        places, first_position = edits.early
        _forbid(flat, places.flat, history.positions.index_select(0, places.rows) < first_position)
    if edits.bad is not None:
        _forbid(flat, edits.bad.places.flat, _about_to_be_completed(edits.bad, history))


def _forbid(flat: Tensor, places: Tensor, condition: Tensor) -> None:
    """−inf where the condition holds; a place may be named several times."""
    flat.index_add_(0, places, torch.where(condition, -torch.inf, 0.0).to(flat.dtype))


def _penalise(logits: Tensor, rows: Tensor, edits: LogitEdits, history: History, parameters: Parameters) -> None:
    """Works on the places of tokens that occurred. A place that is written twice gets the same value both times: where
    nothing is to be done, another occurrence in the same row is done again."""
    flat = logits.view(-1)
    slots, length = history.slots.index_select(0, rows), history.positions.index_select(0, rows)[:, None]
    tokens = history.tokens[:, : history.longest].index_select(0, slots).long()
    presence, frequency = parameters.presence_penalty.float(), parameters.frequency_penalty.float()
    position = torch.arange(history.longest, device=logits.device)
    start = rows[:, None] * logits.shape[1]
    is_known = position < length
    if edits.has_repetition:
        repetition = parameters.repetition_penalty.float()
        places = (start + torch.where(is_known, tokens, tokens[:, :1])).view(-1)
        values = flat.index_select(0, places).view_as(tokens)
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat.index_copy_(0, places, values.view(-1))
    if edits.has_output_penalties:
        num_prompt = parameters.num_prompt_tokens
        is_output = is_known & (position >= num_prompt)
        places = (start + torch.where(is_output, tokens, tokens.gather(1, length - 1))).view(-1)
        values = flat.index_select(0, places).view_as(tokens) - torch.where(length > num_prompt, presence, 0.0)
        flat.index_copy_(0, places, values.view(-1))
        flat.index_add_(0, places, torch.where(is_output, -frequency, 0.0).view(-1))


def _about_to_be_completed(bad: BadTokens, history: History) -> Tensor:
    """bool [B]: the row's last tokens are the beginning of the bad sequence."""
    num = bad.beginnings.shape[1]
    positions = history.positions.index_select(0, bad.places.rows)
    at = (positions[:, None] - num + torch.arange(num, device=positions.device)).clamp_(min=0)
    slots = history.slots.index_select(0, bad.places.rows)
    recent = history.tokens[slots[:, None], at]
    matches = (recent == bad.beginnings) | (bad.beginnings == NO_TOKEN)
    return matches.all(-1) & (positions >= bad.lengths - 1)
