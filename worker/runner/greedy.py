"""How the tokens of steps are chosen whose rows are all greedy and ask for nothing else: as a graph can be captured."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.linear import Finder
from worker.kernels.prepare import REMEMBER
from worker.kernels.sampling import BEST_OF_RANKS
from worker.kernels.select import Kernels
from worker.kernels.step import StagedRows, StepBuffers
from worker.models.base import CausalLM
from worker.parallel.group import Group
from worker.runner.slots import SlotState
from worker.sampling.sampler import Sampler


class ChooseOfLogits(Protocol):
    def __call__(self, logits: Tensor, rows: StagedRows, out: Tensor | None = None) -> Tensor:
        """`out`: where the tokens go, on the host or on the device; None: to new memory."""


@dataclass(frozen=True, slots=True)
class GreedyChoices:
    """Each chooses a token for each of some uniform rows, int64 [R], and has their slots remember it."""

    of_logits: ChooseOfLogits | None = None
    """[R, V]: where this rank has all of them, and chooses for itself alone."""
    of_hidden: Callable[[Tensor, StagedRows], Tensor] | None = None
    """The last hidden states, [R, hidden]: where ranks choose together, or one finds tokens without logits."""
    most_rows_of_hidden: int = 0

    def is_of_hidden(self, rows: int) -> bool:
        return self.of_hidden is not None and rows <= self.most_rows_of_hidden


def choices_alone(
    kernels: Kernels, tp: Group, model: CausalLM, slots: SlotState, buffers: StepBuffers
) -> GreedyChoices:
    """None of them on ranks of a group: one has the logits and chooses for all, which is no graph."""
    if tp.size > 1:
        return GreedyChoices()
    find = model.finder()
    if find is not None:
        return _choices_without_logits(find, kernels, slots, buffers)
    sampler = Sampler(kernels)

    def choose(logits: Tensor, rows: StagedRows, out: Tensor | None = None) -> Tensor:
        positions = buffers.next_positions[: rows.slots.shape[0]]
        return sampler.greedy(logits, slots.parameters, rows.slots, positions, slots.tables, out)

    return GreedyChoices(of_logits=choose)


def _choices_without_logits(find: Finder, kernels: Kernels, slots: SlotState, buffers: StepBuffers) -> GreedyChoices:
    remember = kernels.choose(REMEMBER, None, torch.int64)

    def choose(hidden: Tensor, rows: StagedRows) -> Tensor:
        token_ids = find(hidden)
        remember(slots.tables, rows.slots, buffers.next_positions[: rows.slots.shape[0]], token_ids)
        return token_ids

    return GreedyChoices(of_hidden=choose, most_rows_of_hidden=len(buffers.context_lens))


def choices_of_ranks(
    kernels: Kernels, tp: Group, model: CausalLM, slots: SlotState, buffers: StepBuffers
) -> GreedyChoices | None:
    """Where ranks that share the vocabulary can choose together."""
    head, inboxes = model.output_head(), tp.inboxes
    if head is None or not head.is_shared or inboxes is None:
        return None
    best_of_ranks = kernels.find(BEST_OF_RANKS, None, torch.float32)
    if best_of_ranks is None:
        return None

    def choose(hidden: Tensor, rows: StagedRows) -> Tensor:
        positions = buffers.next_positions[: rows.slots.shape[0]]
        return best_of_ranks(head.part(hidden), head.first_token, inboxes, rows.slots, positions, slots.tables)

    return GreedyChoices(of_hidden=choose, most_rows_of_hidden=inboxes.num_rows)
