"""Phase 3 of a step: from logits to tokens. No host sync, no loop over rows, no state."""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.kernels.sampling import CHOOSE, FAILED, LOGPROBS, MASKED_COPY, DrawRules, Draws, Parameters
from worker.kernels.select import Kernels
from worker.kernels.step import SlotTables
from worker.sampling.edits import History, edit_logits
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.row_rules import EditedRows, RowGroup, RowRules

NOTHING_ALLOWED = -2
"""In place of a token id: the request's own rules leave no token."""
GREEDY = DrawRules(0, None, 0, has_top_p=False, has_top_k_with_top_p=True, has_min_p=False)
ALL_RULES = (
    GREEDY,
    DrawRules(1, None, 0, has_top_p=False, has_top_k_with_top_p=True, has_min_p=False),
    DrawRules(1, None, 0, has_top_p=False, has_top_k_with_top_p=True, has_min_p=True),
    DrawRules(1, None, 1, has_top_p=True, has_top_k_with_top_p=True, has_min_p=True),
)
"""Greedy, drawn, drawn within limits that come without and with a search: see `Sampler.rehearse`."""
NUM_LOGPROBS = 32
"""Most likely tokens that requests ask for."""


class SamplingRows(NamedTuple):
    """The rows to sample; tensors are on the device."""

    rules: RowRules
    history: History
    parameters: Parameters
    """Of all slots."""
    allowed: Tensor
    """int32 [slots, V / 32 rounded up]: a bit for each token that a slot's lists leave."""
    grammar_mask: Tensor | None = None
    """int32 [R, V / 32 rounded up]: a bit for each token that the row's grammar allows; None: no row has one."""


class Sampled(NamedTuple):
    token_ids: Tensor
    """int64 [R]; FAILED or NOTHING_ALLOWED where there is no token."""
    logprobs: LogprobTensors | None
    """Of the rows of `rules.logprobs`."""


class Sampler:
    """Rows whose logits stay as they are are chosen from in the model's own dtype, the others in a float32 copy."""

    def __init__(self, kernels: Kernels) -> None:
        self._choose = kernels.choose(CHOOSE, None, torch.float32)
        self._masked_copy = kernels.choose(MASKED_COPY, None, torch.float32)
        self._logprobs = kernels.choose(LOGPROBS, None, torch.float32)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """Chooses a token for each row. logits [R, V] of the model, which are not changed."""
        token_ids = self.token_ids(logits, rows)
        asking = rows.rules.logprobs
        if asking is None:
            return Sampled(token_ids, None)
        chosen = token_ids if asking.rows is None else token_ids.index_select(0, asking.rows)
        return Sampled(token_ids, self.logprobs(logits, asking.rows, chosen, asking.most))

    def token_ids(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """`sample` without log probabilities: int64 [R]."""
        rules = rows.rules
        found = []
        if rules.plain is not None:
            found.append((rules.plain, self._choose(logits, rules.plain.rows, _draws(rules.plain, rows))))
        if rules.edited is not None:
            group = rules.edited.group
            copy, is_finite = self.edited(logits, rows, rules.edited)
            ids = self._choose(copy, None, _draws(group, rows))
            found.append(
                (group, ids.masked_fill_((ids == FAILED) & is_finite, NOTHING_ALLOWED).masked_fill_(~is_finite, FAILED))
            )
        if len(found) == 1:
            return found[0][1]
        token_ids = torch.empty(rules.num_rows, dtype=torch.int64, device=logits.device)
        for group, ids in found:
            assert group.rows is not None
            token_ids.index_copy_(0, group.rows, ids)
        return token_ids

    def greedy(
        self, logits: Tensor, parameters: Parameters, slots: Tensor, positions: Tensor, remembered: SlotTables,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`sample` of rows whose rules are greedy, int64 [R], which their slots remember. `out`: see `ChooseKernel`."""
        return self._choose(logits, None, Draws(GREEDY, parameters, slots, positions), remembered, out)

    def logprobs(self, logits: Tensor, rows: Tensor | None, token_ids: Tensor, most: int) -> LogprobTensors:
        """Of the model's own distribution: see `LogprobsKernel`. `most` may be more than there are tokens."""
        return LogprobTensors(*self._logprobs(logits, rows, token_ids, min(most, logits.shape[1])))

    def edited(self, logits: Tensor, rows: SamplingRows, edited: EditedRows) -> tuple[Tensor, Tensor]:
        """float32 [E, V]: the edited rows' logits as tokens are chosen from them; bool [E]: the model's are finite."""
        group = edited.group
        history = rows.history.select(group.rows)
        mask = rows.allowed.index_select(0, history.slots) if edited.is_restricted else None
        if rows.grammar_mask is not None:
            grammar = rows.grammar_mask if group.rows is None else rows.grammar_mask.index_select(0, group.rows)
            mask = grammar if mask is None else mask.bitwise_and_(grammar)
        copy, is_finite = self._masked_copy(logits, group.rows, group.num_rows, mask)
        edit_logits(copy, edited.edits, history, rows.parameters)
        return copy, is_finite

    def rehearse(self, logits: Tensor, parameters: Parameters) -> None:
        """Call each operation in all ways that differ to it: `logits` [R, V] and `parameters` are as in a step."""
        index = torch.zeros(1, dtype=torch.int64, device=logits.device)
        mask = torch.zeros(1, -(-logits.shape[1] // 32), dtype=torch.int32, device=logits.device)
        all_draws = [Draws(rules, parameters, index, index) for rules in ALL_RULES]
        for rows in (None, index):
            for draws in all_draws:
                self._choose(logits, rows, draws)
            for most in range(NUM_LOGPROBS + 1):
                self.logprobs(logits, rows, index, most)
            for allowed in (None, mask):
                copy, _ = self._masked_copy(logits, rows, 1, allowed)
        for draws in all_draws:
            self._choose(copy, None, draws)


def _draws(group: RowGroup, rows: SamplingRows) -> Draws:
    history = rows.history.select(group.rows)
    return Draws(group.draws, rows.parameters, history.slots, history.positions)
