"""Drafts of a head that goes on from the hidden states of the model, as layers for multi-token prediction do."""

import torch
from torch import Tensor

from worker.models.state_head import StateHead
from worker.runner.drafting.drafting import Drafting, DraftingParts
from worker.runner.graphs import GraphDevice, GraphSizes, Outputs
from worker.runner.greedy import GreedyChoices
from worker.runner.prepare import StepInputs


class StateDrafting(Drafting):
    """See `Drafting`. It takes in the tokens of a step behind the model, whose hidden states it needs.

    The states that a row's first tokens were predicted from stand in the slot: another step left them, one for each
    layer of the head. After a prefix that was found in the cache, or a swap, that step was another slot's: what is kept
    of those tokens is wrong then, and drafts are a little worse.
    """

    def __init__(self, parts: DraftingParts) -> None:
        super().__init__(parts)
        head = self.draft.model
        assert isinstance(head, StateHead)
        self._head, self._previous = head, head.previous
        depth, _, size = self._previous.shape
        self._back = torch.arange(depth, device=parts.kernels.device)
        self._last = self._previous.new_zeros(parts.slots.spare_slot + 1, depth, size)
        """Of each slot: the states behind the last tokens that the model took in, the last one first; zeros where there
        are no tokens."""
        self._trail, self._places = self._previous[0, :0], self._back
        """Of the last step: what stood in `_last` for each row, in the order of the tokens, and behind it the states of
        the row's tokens; where the state of each token is."""

    @property
    def needs_hidden(self) -> bool:
        return self._head.needs_hidden

    def capture(self, device: GraphDevice, sizes: GraphSizes, greedy: GreedyChoices) -> None:
        """Not at all: between the model's graph and the one that samples none of the same memory may be replayed."""

    def _begin_pass(self, number: int, slots: Tensor, before: Outputs | None) -> None:
        depth, num_rows = len(self._back), len(slots)
        self._head.turn = turn = min(number, depth - 1)
        if number < depth or before is None:
            last = self._last.index_select(0, slots)[:, : depth - turn]
            self._previous[turn:, :num_rows].copy_(last.transpose(0, 1))
        else:
            self._previous[turn, :num_rows].copy_(before.hidden[:num_rows])

    def follow(self, inputs: StepInputs) -> None:
        pass

    def see(self, inputs: StepInputs, hidden: Tensor) -> None:
        step, slots = inputs.step, inputs.rows.slots
        starts = self._preparer.buffers.query_starts[: step.num_rows + 1].long()
        self._lay_trail(slots, starts, self._head.states(hidden, step.num_tokens))
        for number, previous in enumerate(self._previous):
            previous[: step.num_tokens].copy_(self._trail.index_select(0, self._places - 1 - number))
        self._head.turn = 0
        # For keys and values: what it returns nobody reads.
        self._forward.run(step, inputs.rows, self._back[:1])
        self.keep(slots, starts[1:] - 1)

    def _lay_trail(self, slots: Tensor, starts: Tensor, states: Tensor) -> None:
        """`starts`, int64 [R + 1]: of the rows, and the end; `states` of their tokens, [T, hidden]."""
        depth, num_rows = len(self._back), len(slots)
        rows = torch.arange(num_rows, device=starts.device)
        of_tokens = rows.repeat_interleave(starts.diff(), output_size=len(states))
        self._places = torch.arange(len(states), device=starts.device) + depth * (of_tokens + 1)
        positions = self._preparer.buffers.positions.index_select(0, starts[:-1])
        is_there = (positions.unsqueeze(1) > self._back).unsqueeze(2)
        before = torch.where(is_there, self._last.index_select(0, slots), 0).flip(1)
        places = (starts[:-1] + depth * rows).unsqueeze(1) + self._back
        self._trail = states.new_empty(len(states) + depth * num_rows, states.shape[1])
        self._trail.index_copy_(0, places.flatten(), before.flatten(0, 1))
        self._trail.index_copy_(0, self._places, states)

    def keep(self, slots: Tensor, tokens: Tensor) -> None:
        places = self._places.index_select(0, tokens).unsqueeze(1) - self._back
        self._last.index_copy_(0, slots, self._trail[places])
