"""The model runner of one rank: carries out scheduled batches, in three phases (prepare, run, postprocess)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.interface import CacheBuilder
from worker.core.batch import FIRST_NEWS, BatchOutput, ScheduledBatch
from worker.core.tokens import token_array
from worker.grammars.masks import PendingMasks, SlotGrammars
from worker.kernels.native.tape import Tapes
from worker.kernels.prepare import REMEMBER
from worker.kernels.select import Kernels
from worker.kernels.step import Round
from worker.kernels.transfer import indices
from worker.models.base import CausalLM
from worker.parallel.group import Group
from worker.runner.cuda_graphs import CudaGraphs
from worker.runner.drafting.drafting import Drafting
from worker.runner.entries import EntryMover
from worker.runner.forward import ForwardPass
from worker.runner.graphs import GraphDevice, GraphSizes, Outputs, Take
from worker.runner.greedy import GreedyChoices, choices_alone, choices_of_ranks
from worker.runner.pending import PendingStep
from worker.runner.prepare import PromptInputs, StepInputs, StepPreparer, first
from worker.runner.profiler import StepProfiler
from worker.runner.slots import SlotState
from worker.runner.timer import StepTimer, Timing
from worker.sampling.edits import History
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.row_rules import RowRules
from worker.sampling.sampler import Sampler, SamplingRows
from worker.sampling.verify import count_new

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = "the device ran out of memory"
PROMPT_LOGITS = 256
"""Prompt tokens whose logits exist at a time: they are as wide as the vocabulary."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of; `worker.runner.build` makes it."""

    kernels: Kernels
    tp: Group
    model: CausalLM
    builders: Sequence[CacheBuilder]
    mover: EntryMover
    slots: SlotState
    preparer: StepPreparer
    forward: ForwardPass
    grammars: SlotGrammars | None
    """On rank 0, whose choice of tokens the others take over."""
    drafting: Drafting | None
    """Where there is a draft model."""


class ModelRunner:
    """Runs steps in the order of `submit`. Not thread-safe: one thread owns it."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._model, self._slots, self._tp = parts.model, parts.slots, parts.tp
        self._find_greedy = parts.model.finder()
        self._device = parts.kernels.device
        self.is_done_at_submit = self._device.type == "cpu"
        """A step has nothing to wait for then, and its tensors are on the host."""
        self._sampler = Sampler(parts.kernels)
        self._remember = parts.kernels.choose(REMEMBER, None, torch.int64)
        self.grammars = parts.grammars
        self._timer = StepTimer(self._device)
        self.profiler = StepProfiler(self._device)

    @torch.inference_mode()
    def capture(self, sizes: GraphSizes, device: GraphDevice | None = None) -> None:
        """Graphs of these sizes, for the steps to come; by default on the runner's own device. Raises
        UnrecordableError."""
        self._parts.preparer.prepare_padding()
        parts, buffers = self._parts, self._parts.preparer.buffers
        of_ranks = choices_of_ranks(parts.kernels, self._tp, self._model, self._slots, buffers)
        device = device or (Tapes() if self.is_done_at_submit else CudaGraphs(self._device))
        parts.forward.capture(device, sizes, of_ranks or self._choices_alone(self._model))
        if parts.drafting is not None:
            parts.drafting.capture(device, sizes, self._choices_alone(parts.drafting.draft.model))

    def _choices_alone(self, model: CausalLM) -> GreedyChoices:
        return choices_alone(self._parts.kernels, self._tp, model, self._slots, self._parts.preparer.buffers)

    def submit(self, batch: ScheduledBatch, together: Round | None = None) -> PendingStep:
        """Start a step. On a GPU this returns while the device still works; on a CPU the step is done. `together`: what
        was agreed on with the ranks that make a step at the same time. The thread is in inference mode already: a step
        of a CPU would feel that it is turned on and off."""
        take = self._take_of(batch) if together is None else None
        if take is not None:
            with self.profiler.span("run"):
                return take.start(batch)
        timing = self._timer.start()
        span = self.profiler.span
        with span("prepare"):
            self._parts.mover.move(batch)
            inputs = self._parts.preparer.prepare(batch, together)
        drafting = self._parts.drafting
        try:
            if drafting is not None:
                with span("draft"):
                    batch = self._draft(drafting, batch, together)
            masks = self.grammars.start(batch, inputs.sampled_rows) if self.grammars is not None else None
            with span("run"):
                outputs = self._run(inputs)
            with span("postprocess"):
                return self._postprocess(batch, inputs, outputs, timing, masks)
        except torch.OutOfMemoryError as error:
            if self._tp.size > 1 or together is not None:
                raise  # the other ranks are in the midst of it
            return self._out_of_memory(batch, timing, error)

    def _take_of(self, batch: ScheduledBatch) -> Take | None:
        """Where the step is one graph: few rows, greedy all of them, those of the step before, and nothing is new."""
        if len(batch.slots) > self._parts.forward.whole_rows:
            return None
        if any(batch[FIRST_NEWS:]) or self._parts.drafting is not None:
            return None
        if not all(batch.samples) or max(batch.num_scheduled_tokens) > 1:
            return None
        num_rows = self._parts.preparer.num_staged(batch.slots)
        if num_rows is None or not self._slots.rules.of(batch.slots).is_greedy:
            return None
        return self._parts.forward.next_take(num_rows, max(batch.num_computed_tokens) + 1)

    def _draft(self, drafting: Drafting, batch: ScheduledBatch, together: Round | None) -> ScheduledBatch:
        """Has drafts proposed. Returns the batch, with the drafts in it if a grammar has to see them."""
        drafting.propose(batch, together)
        drafted = (batch.slots[row] for row in batch.num_draft_tokens)
        if self.grammars is not None and self.grammars.has_any(drafted):
            return drafting.read(batch)
        return batch

    def _run(self, inputs: StepInputs) -> Outputs:
        run, drafting = self._parts.forward.run, self._parts.drafting
        if drafting is None:
            return run(inputs.step, inputs.rows, inputs.wanted)
        drafting.follow(inputs)
        outputs = run(inputs.step, inputs.rows, None if drafting.needs_hidden else inputs.wanted)
        drafting.see(inputs, outputs.hidden)
        return outputs

    def idle_batch(self, together: Round) -> ScheduledBatch:
        """For a rank without work among others that have some: a token of the spare slot in the spare block. It is
        sampled where that is part of the graph that all replay, else logits would be computed for nobody."""
        return ScheduledBatch(
            step=0, slots=[self._slots.spare_slot], num_scheduled_tokens=[1], num_computed_tokens=[0],
            input_ids=token_array([0]), samples=[together.is_uniform and self._parts.forward.has_full_graphs],
            is_dummy=True,
        )  # fmt: skip

    def close(self) -> None:
        """No step will follow. Graphs hold on to the communicators that they captured, which could not end."""
        self._parts.forward.release()
        if self._parts.drafting is not None:
            self._parts.drafting.release()

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> BatchOutput:
        """`submit` and wait."""
        return self.submit(batch).result()

    def _out_of_memory(self, batch: ScheduledBatch, timing: Timing, error: torch.OutOfMemoryError) -> PendingStep:
        """The step's requests end: their slots are bound anew by whoever comes next. No other entry was written."""
        logger.error("step %d ran out of memory: %s", batch.step, error)
        torch.cuda.empty_cache()
        timing.stop()
        return PendingStep(batch, [], timing, failure=OUT_OF_MEMORY)

    def _postprocess(
        self, batch: ScheduledBatch, inputs: StepInputs, outputs: Outputs, timing: Timing, masks: PendingMasks | None
    ) -> PendingStep:
        rows = inputs.sampled_rows
        pending = PendingStep(batch, rows, timing)
        last = None if outputs.logits is not None else _last_hidden(outputs, inputs)
        if inputs.other_rows:
            # Its last token has looked at all keys and values of the row. Logits tell the same of the sampled rows.
            assert last is not None
            is_finite = last[len(rows) :].isfinite().all(-1)
            pending.other_rows, pending.others_finite = inputs.other_rows, self._to_host(is_finite)
        if inputs.prompt is not None:
            found = self._prompt_logprobs(inputs.prompt, outputs.hidden)
            if found is not None:
                pending.prompt_rows, pending.prompt_logprobs = inputs.prompt.rows, self._logprobs_to_host(found)
        if rows:
            pending.token_ids = self._to_host(self._new_tokens(batch, inputs, outputs, last, pending, masks))
        timing.stop()
        if self.is_done_at_submit:
            pending.result()  # before the next step, which may overwrite what this one leaves
        return pending

    def _new_tokens(
        self, batch: ScheduledBatch, inputs: StepInputs, outputs: Outputs, last: Tensor | None, pending: PendingStep,
        masks: PendingMasks | None,
    ) -> Tensor:  # fmt: skip
        """The sampled tokens, int64 [S], of which the slots remember those that count. `last`: hidden states, where
        there are no logits yet."""
        num_sampled = len(inputs.sampled_rows)
        rules = self._slots.rules.of([batch.slots[row] for row in inputs.sampled_rows])
        is_greedy = rules.is_greedy and not batch.beam_rows
        if outputs.greedy is not None and is_greedy and not batch.is_dummy:
            return first(outputs.greedy.choose(), num_sampled)
        slots = inputs.of_sampled(inputs.rows.slots)
        if inputs.drafts is None:
            positions = inputs.of_sampled(self._parts.preparer.buffers.next_positions)
        else:
            positions = self._drafted_positions(inputs)
        history = History(self._slots.tables.tokens, slots, positions, inputs.longest_sampled)
        if is_greedy and last is not None and self._find_greedy is not None:
            token_ids = self._find_greedy(first(last, num_sampled))
        else:
            logits = self._logits(outputs, last, num_sampled)
            token_ids = self._sample(batch, inputs, logits, rules, history, pending, masks)
        newest = token_ids
        if (drafts := inputs.drafts) is not None:
            # Drafts are in the slots' tables already, where the tokens stand that are sampled.
            places = slots * history.tokens.shape[1] + positions
            num_new = count_new(token_ids, history.tokens.view(-1).index_select(0, places), drafts)
            last = drafts.firsts + num_new - 1
            slots, positions, newest = (by_token.index_select(0, last) for by_token in (slots, positions, token_ids))
            pending.num_new = self._to_host(num_new)
            if self._parts.drafting is not None:
                self._parts.drafting.keep(slots, inputs.last_tokens.index_select(0, last))
        if not batch.is_dummy:
            self._remember(self._slots.tables, slots, positions, newest)
        return token_ids

    def _logits(self, outputs: Outputs, last: Tensor | None, num_sampled: int) -> Tensor | None:
        """Of the sampled rows, and padding."""
        if outputs.logits is not None:
            return outputs.logits.compute()
        assert last is not None
        return self._model.logits(first(last, num_sampled))

    def _drafted_positions(self, inputs: StepInputs) -> Tensor:
        """int64: where the tokens to be sampled stand."""
        after = inputs.last_tokens[: len(inputs.sampled_rows)]
        return self._parts.preparer.buffers.positions.index_select(0, after) + 1

    def _sample(
        self, batch: ScheduledBatch, inputs: StepInputs, logits: Tensor | None, rules: RowRules, history: History,
        pending: PendingStep, masks: PendingMasks | None,
    ) -> Tensor:  # fmt: skip
        """Rank 0 has the logits, [R, V] and padding, and chooses for all ranks."""
        rows = inputs.sampled_rows
        if logits is None:
            return self._tp.broadcast(torch.empty(len(rows), dtype=torch.int64, device=self._device))
        logits = first(logits, len(rows))
        if batch.beam_rows:
            pending.candidates = self._candidates(batch, rows, logits)
        grammar_mask = masks.take(pending) if masks is not None else None
        sampling = SamplingRows(rules, history, self._slots.parameters, self._slots.allowed, grammar_mask)
        sampled = self._sampler.sample(logits, sampling)
        if sampled.logprobs is not None:
            pending.logprob_rows = rules.logprobs
            pending.logprobs = self._logprobs_to_host(sampled.logprobs)
        return self._tp.broadcast(sampled.token_ids)

    def _prompt_logprobs(self, prompt: PromptInputs, hidden: Tensor) -> LogprobTensors | None:
        """None on ranks that have no logits."""
        targets = self._slots.tables.tokens[prompt.slots, prompt.next_positions].long()
        most = max(most for *_, most in prompt.rows)
        parts = []
        for step_tokens, token_ids in zip(
            prompt.step_tokens.split(PROMPT_LOGITS), targets.split(PROMPT_LOGITS), strict=True
        ):
            logits = self._model.logits(hidden.index_select(0, step_tokens))
            if logits is not None:
                parts.append(self._sampler.logprobs(logits, None, token_ids, most))
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True))) if parts else None

    def _candidates(self, batch: ScheduledBatch, rows: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best next tokens of the beam rows, which must all be sampling rows."""
        index = indices([rows.index(row) for row in batch.beam_rows], self._device)
        scores = logits.index_select(0, index).float().log_softmax(-1)
        best = scores.topk(min(batch.num_candidates, scores.shape[1]))
        return self._to_host(best.indices), self._to_host(best.values)

    def _logprobs_to_host(self, tensors: LogprobTensors) -> LogprobTensors:
        return LogprobTensors(*map(self._to_host, tensors))

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Start the copy; it is there once the step's timing is done."""
        if self.is_done_at_submit:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _last_hidden(outputs: Outputs, inputs: StepInputs) -> Tensor:
    """[R + U, hidden] of `StepInputs.last_tokens`."""
    is_last_only = outputs.is_wanted_only or inputs.is_uniform
    return outputs.hidden if is_last_only else outputs.hidden.index_select(0, inputs.last_tokens)
