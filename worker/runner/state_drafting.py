"""Drafts of a head that goes on from the hidden states of the model, as layers for multi-token prediction do."""

import torch
from torch import Tensor

from worker.kernels.select import Kernels
from worker.models.state_head import StateHead
from worker.parallel.group import Group
from worker.runner.drafting import Draft, Drafting
from worker.runner.graphs import GraphDevice, GraphSizes, GreedyChoice, Outputs
from worker.runner.prepare import StepInputs, StepPreparer
from worker.runner.slots import SlotState


class StateDrafting(Drafting):
    """See `Drafting`. It takes in the tokens of a step behind the model, whose hidden states it needs.

    The state that a token was predicted from stands, of a row's first token, in the slot: another step left it. After
    a prefix that was found in the cache, or a swap, that step was another slot's: what is kept of that one token is
    wrong then, and drafts are a little worse.
    """

    def __init__(
        self, draft: Draft, preparer: StepPreparer, slots: SlotState, kernels: Kernels, tp: Group, max_context_len: int
    ) -> None:
        super().__init__(draft, preparer, slots, kernels, tp, max_context_len)
        assert isinstance(draft.model, StateHead)
        self._head, self._previous = draft.model, draft.model.previous
        self._last = self._previous.new_zeros(slots.spare_slot + 1, self._previous.shape[1])
        """Of each slot: the state behind the last token that the model took in."""
        self._states = self._previous[:0]
        """Of the last step."""

    @property
    def needs_hidden(self) -> bool:
        return self._head.needs_hidden

    def capture(self, device: GraphDevice, sizes: GraphSizes, choose_greedily: GreedyChoice | None) -> None:
        """Not at all: between the model's graph and the one that samples none of the same memory may be replayed."""

    def _begin_pass(self, slots: Tensor, before: Outputs | None) -> None:
        hidden = self._last.index_select(0, slots) if before is None else before.hidden[: len(slots)]
        self._previous[: len(slots)].copy_(hidden)

    def follow(self, inputs: StepInputs) -> None:
        pass

    def see(self, inputs: StepInputs, hidden: Tensor) -> None:
        step, buffers = inputs.step, self._preparer.buffers
        num_tokens, slots = step.num_tokens, inputs.rows.slots
        states = self._head.states(hidden, num_tokens)
        starts, ends = (buffers.query_starts[at : at + step.num_rows].long() for at in (0, 1))
        self._previous[1:num_tokens].copy_(states[:-1])
        is_later = buffers.positions.index_select(0, starts).bool().unsqueeze(1)
        self._previous.index_copy_(0, starts, torch.where(is_later, self._last.index_select(0, slots), 0))
        self._forward.run(step, inputs.rows)
        self._last.index_copy_(0, slots, states.index_select(0, ends - 1))
        self._states = states

    def keep(self, slots: Tensor, tokens: Tensor) -> None:
        self._last.index_copy_(0, slots, self._states.index_select(0, tokens))
