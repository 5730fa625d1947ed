"""A draft model: a small model of the same vocabulary that guesses the next tokens of a sequence one after another.

Its layers are further layers of the same blocks, so whatever happens to a block (prefix hits, copies, swaps, clearing)
happens to its keys and values, too, and nobody outside the runner knows of them. It looks at all tokens that the model
looks at, in the same step: the blocks hold what it computed of a token exactly if they hold what the model did.

It proposes at the beginning of the step that tries the drafts, not at the end of the one before: only then have its
sequences the blocks that drafts are written to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from worker.attention.interface import CacheBuilder
from worker.core.batch import ScheduledBatch
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec
from worker.core.tokens import token_array
from worker.kernels.prepare import REMEMBER
from worker.kernels.select import Kernels
from worker.kernels.step import Round, StagedRows
from worker.kernels.transfer import to_device
from worker.models.base import CausalLM
from worker.parallel.group import Group
from worker.runner.forward import ForwardPass
from worker.runner.graphs import GraphDevice, GraphSizes, Outputs
from worker.runner.greedy import GreedyChoices
from worker.runner.prepare import StepInputs, StepPreparer
from worker.runner.slots import SlotState
from worker.sampling.edits import History
from worker.sampling.row_rules import RowRules
from worker.sampling.sampler import Sampler, SamplingRows


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model, and who owns its caches."""

    model: CausalLM
    builders: Sequence[CacheBuilder]
    has_spread_experts: bool = False
    """Over ranks that make a step at the same time, and its passes, too: none of them could make one alone."""

    @property
    def has_state(self) -> bool:
        """Of each request, which cannot take back what it took in: see `worker.runner.drafting.recurrent`."""
        return any(spec.kind is PoolKind.STATE for builder in self.builders for spec in builder.pool_specs())

    def pool_specs(self) -> list[PoolSpec]:
        """With a copy of each state."""
        specs = [spec for builder in self.builders for spec in builder.pool_specs()]
        return [replace(spec, entries_per_request=2 * spec.entries_per_request) for spec in specs]

    def allocate(self, plan: PoolPlan) -> None:
        """The caches, with a copy of each group behind all of them, the spare one included."""
        for builder in self.builders:
            builder.allocate(replace(plan, num_groups=2 * plan.num_groups + 1))


@dataclass(frozen=True, slots=True)
class DraftingParts:
    """What a drafting is made of. The draft's caches are bound."""

    draft: DraftModel
    preparer: StepPreparer
    slots: SlotState
    kernels: Kernels
    tp: Group
    max_context_len: int


class Drafting:
    """Of one rank. Drafts are drawn by their request's own rules, with the noise of the position that they are for: a
    model that is close to the one that is served then draws the same token (Daliri et al., arXiv 2408.07978)."""

    def __init__(self, parts: DraftingParts) -> None:
        self.draft = parts.draft
        self._preparer, self._slots, self._tp = parts.preparer, parts.slots, parts.tp
        self._forward = ForwardPass(self.draft.model, self.draft.builders, parts.preparer, parts.max_context_len)
        self._sampler = Sampler(parts.kernels)
        self._find_greedy = parts.draft.model.finder()
        self._remember = parts.kernels.choose(REMEMBER, None, torch.int64)

    def capture(self, device: GraphDevice, sizes: GraphSizes, greedy: GreedyChoices) -> None:
        """See `ForwardPass.capture`."""
        self._forward.capture(device, sizes, greedy)

    def release(self) -> None:
        """See `ForwardPass.release`."""
        self._forward.release()

    @property
    def needs_hidden(self) -> bool:
        """Whether `see` wants the hidden states of all tokens."""
        return False

    def propose(self, batch: ScheduledBatch, together: Round | None) -> None:
        """Put drafts into the slots' tables, where the batch has places for them. The tables know all else of the
        batch. While drafts are made a slot's length counts them; whoever samples its row sets that right. `together`:
        see `ModelRunner.submit`; a rank may make passes for the drafts of others alone."""
        # Those with most drafts first, so that each pass has the first rows of the one before.
        drafted = {} if batch.is_dummy else batch.num_draft_tokens
        counts = sorted(drafted.items(), key=lambda item: -item[1])
        num_passes, of_pass = max(drafted.values(), default=0), None
        if together is not None and self.draft.has_spread_experts:
            num_passes, of_pass = together.num_drafts, Round(together.num_drafted_rows, is_uniform=False)
        outputs = None
        for number in range(num_passes):
            rows = [row for row, num in counts if num > number]
            if rows:
                outputs = self._propose_next(number, batch, rows, outputs, of_pass)
            else:
                self._join(number, of_pass)

    def _join(self, number: int, together: Round | None) -> None:
        """A pass for others alone."""
        step, spare = self._preparer.spare_row(together)
        self._begin_pass(number, spare.slots, None)
        self._forward.run(step, spare)

    def _propose_next(
        self, number: int, batch: ScheduledBatch, rows: list[int], before: Outputs | None, together: Round | None
    ) -> Outputs:
        """A draft more of each of these rows, which have `number` already. `before`: of the pass before."""
        slots = [batch.slots[row] for row in rows]
        longest = max(batch.num_computed_tokens[row] for row in rows) + 1 + number
        step, staged = self._preparer.stage_uniform(slots, longest, together)
        self._begin_pass(number, staged.slots[: len(slots)], before)
        outputs = self._forward.run(step, staged)
        self._draw(outputs, slots, staged, longest)
        return outputs

    def _draw(self, outputs: Outputs, slots: list[int], rows: StagedRows, longest: int) -> None:
        """A token more of each of these slots, the first of a pass's rows, of whose contexts none is longer."""
        rules = self._slots.rules.of(slots)
        if outputs.greedy is not None and rules.is_greedy:
            outputs.greedy.choose()
            return
        positions = self._preparer.buffers.next_positions[: len(slots)]
        history = History(self._slots.tables.tokens, rows.slots[: len(slots)], positions, longest)
        hidden = outputs.hidden[: len(slots)]
        if rules.is_greedy and outputs.logits is None and self._find_greedy is not None:
            token_ids = self._find_greedy(hidden)
        else:
            logits = self.draft.model.logits(hidden) if outputs.logits is None else outputs.logits.compute()
            token_ids = self._sampled(logits, rules, history)
        self._remember(self._slots.tables, history.slots, positions, self._tp.broadcast(token_ids))

    def _sampled(self, logits: Tensor | None, rules: RowRules, history: History) -> Tensor:
        if logits is None:
            return history.positions.new_empty(rules.num_rows)
        asked = SamplingRows(replace(rules, logprobs=None), history, self._slots.parameters, self._slots.allowed)
        return self._sampler.token_ids(logits[: rules.num_rows], asked)

    def _begin_pass(self, number: int, slots: Tensor, before: Outputs | None) -> None:
        """A pass over the newest token of each of these slots is next, the first being number 0. `before`: of the pass
        before it, whose first rows were the same."""

    def follow(self, inputs: StepInputs) -> None:
        """Take in the tokens of a step, drafts included, before the model does."""
        self._forward.run(inputs.step, inputs.rows, inputs.wanted)

    def see(self, inputs: StepInputs, hidden: Tensor) -> None:
        """After the model's pass: the last hidden states that it left, [T, hidden]."""

    def keep(self, slots: Tensor, tokens: Tensor) -> None:
        """Of rows with drafts, int64 [N]: which token of the step was the last that was right."""

    def read(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The batch with the drafts in their places, for who needs them on the host. Waits for the device."""
        tokens = self._slots.tables.tokens
        ends = list(accumulate(batch.num_scheduled_tokens))
        places, known = [], []
        for row, num in batch.num_draft_tokens.items():
            position = batch.num_computed_tokens[row] + batch.num_scheduled_tokens[row] - num
            known.append(np.arange(num) + batch.slots[row] * tokens.shape[1] + position)
            places.append(np.arange(ends[row] - num, ends[row]))
        input_ids = np.array(batch.input_ids)
        where = to_device(torch.from_numpy(np.concatenate(known)), tokens.device)
        input_ids[np.concatenate(places)] = tokens.view(-1).index_select(0, where).cpu().numpy()
        return batch._replace(input_ids=token_array(input_ids.tolist()))
