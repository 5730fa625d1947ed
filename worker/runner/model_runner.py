"""The model runner of one rank: carries out scheduled batches, in three phases (prepare, run, postprocess)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.gqa import GQABuilder, KVCache
from worker.core.batch import BatchOutput, ScheduledBatch
from worker.kernels.interface import KernelBackend
from worker.kernels.transfer import to_device
from worker.layers.parallel import TensorParallel
from worker.models.base import CausalLM
from worker.runner.forward_context import forward_context
from worker.runner.grammar_masks import PendingMasks, SlotGrammars
from worker.runner.inputs import InputBuilder, PromptInputs, StepInputs
from worker.runner.logit_edits import History
from worker.runner.logprobs import LogprobTensors, token_logprobs
from worker.runner.pending import PendingStep
from worker.runner.row_plan import PlanCache
from worker.runner.sampler import Sampler, SamplingRows
from worker.runner.slots import SlotState
from worker.runner.timer import StepTimer, Timing

PROMPT_LOGITS = 256
"""Prompt tokens whose logits exist at a time: they are as wide as the vocabulary."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of; `worker.runner.build` makes it."""

    kernels: KernelBackend
    parallel: TensorParallel
    model: CausalLM
    builder: GQABuilder
    cache: KVCache
    host_cache: KVCache
    """Room for swapped blocks; of no blocks when there is no swap space."""
    slots: SlotState
    block_size: int
    grammars: SlotGrammars | None
    """On rank 0, whose choice of tokens the others take over."""


class ModelRunner:
    """Runs steps in the order of `submit`. Not thread-safe: one thread owns it."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._kernels, self._model, self._slots = parts.kernels, parts.model, parts.slots
        self._inputs = InputBuilder(parts.slots, parts.builder, parts.block_size, parts.kernels.device)
        self._plans = PlanCache(parts.slots, parts.kernels.device)
        self._sampler = Sampler(parts.kernels)
        self.grammars = parts.grammars
        self._timer = StepTimer(parts.kernels.device)

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step. On a GPU this returns while the device still works; on a CPU the step is done."""
        timing = self._timer.start()
        self._move_blocks(batch)
        inputs = self._inputs.prepare(batch)
        masks = self.grammars.start(batch, inputs.sampled_rows) if self.grammars is not None else None
        with forward_context(inputs.context):
            hidden = self._model.forward(inputs.input_ids, inputs.context.positions)
        return self._postprocess(batch, inputs, hidden, timing, masks)

    def execute(self, batch: ScheduledBatch) -> BatchOutput:
        """`submit` and wait."""
        return self.submit(batch).result()

    def _move_blocks(self, batch: ScheduledBatch) -> None:
        """Clear, swap out, copy, swap in: in this order, before anything of the step reads or writes the cache."""
        pairs = ((self._parts.cache.k, self._parts.host_cache.k), (self._parts.cache.v, self._parts.host_cache.v))
        for cache, host in pairs:
            if batch.blocks_to_zero:
                self._kernels.zero_blocks(cache, self._indices(batch.blocks_to_zero))
            if batch.blocks_to_swap_out:
                blocks, host_blocks = zip(*batch.blocks_to_swap_out, strict=True)
                self._kernels.swap_out(cache, host, self._indices(blocks), list(host_blocks))
            if batch.blocks_to_copy:
                sources, destinations = zip(*batch.blocks_to_copy, strict=True)
                self._kernels.copy_blocks(cache, self._indices(sources), self._indices(destinations))
            if batch.blocks_to_swap_in:
                host_blocks, blocks = zip(*batch.blocks_to_swap_in, strict=True)
                self._kernels.swap_in(cache, host, self._indices(blocks), list(host_blocks))

    def _postprocess(
        self, batch: ScheduledBatch, inputs: StepInputs, hidden: Tensor, timing: Timing, masks: PendingMasks | None
    ) -> PendingStep:
        rows = inputs.sampled_rows
        pending = PendingStep(batch, rows, timing)
        if inputs.other_rows:
            # Its last token has looked at all keys and values of the row. Logits tell the same of the sampled rows.
            last = hidden.index_select(0, inputs.other_tokens)
            pending.other_rows, pending.others_finite = inputs.other_rows, self._to_host(last.isfinite().all(-1))
        if inputs.prompt is not None:
            pending.prompt_rows = inputs.prompt.rows
            pending.prompt_logprobs = self._logprobs_to_host(self._prompt_logprobs(inputs.prompt, hidden))
        if rows:
            logits = self._model.logits(hidden.index_select(0, inputs.logit_tokens)).float().contiguous()
            if batch.beam_rows:
                pending.candidates = self._candidates(batch, rows, logits)
            grammar_mask = masks.take(pending) if masks is not None else None
            sampling = self._sampling_rows(batch, inputs, logits.shape[1], grammar_mask)
            sampled = self._sampler.sample(logits, sampling)
            token_ids = self._parts.parallel.broadcast(sampled.token_ids)
            self._slots.remember(inputs.sampled_slots, inputs.sampled_positions, token_ids.clamp(min=0))
            pending.token_ids = self._to_host(token_ids)
            if sampled.logprobs is not None:
                pending.logprob_rows = sampling.plan.logprobs
                pending.logprobs = self._logprobs_to_host(sampled.logprobs)
        timing.stop()
        return pending

    def _sampling_rows(
        self, batch: ScheduledBatch, inputs: StepInputs, vocab_size: int, grammar_mask: Tensor | None
    ) -> SamplingRows:
        slots = inputs.sampled_slots
        integers = self._slots.integers.index_select(0, slots)
        return SamplingRows(
            plan=self._plans.plan([batch.slots[row] for row in inputs.sampled_rows], vocab_size),
            integers=integers,
            floats=self._slots.floats.index_select(0, slots),
            history=History(
                self._slots.tokens, slots, inputs.sampled_positions, integers[:, 2], inputs.longest_sampled
            ),
            grammar_mask=grammar_mask,
        )

    def _prompt_logprobs(self, prompt: PromptInputs, hidden: Tensor) -> LogprobTensors:
        targets = self._slots.tokens[prompt.slots, prompt.next_positions].long()
        most = max(most for *_, most in prompt.rows)
        parts = []
        for step_tokens, token_ids in zip(
            prompt.step_tokens.split(PROMPT_LOGITS), targets.split(PROMPT_LOGITS), strict=True
        ):
            logprobs = self._model.logits(hidden.index_select(0, step_tokens)).float().log_softmax(-1)
            parts.append(token_logprobs(logprobs, token_ids, min(most, logprobs.shape[1])))
        return LogprobTensors(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )

    def _candidates(self, batch: ScheduledBatch, rows: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best next tokens of the beam rows, which must all be sampling rows."""
        index = self._indices([rows.index(row) for row in batch.beam_rows])
        scores = torch.log_softmax(logits.index_select(0, index), -1)
        best = scores.topk(min(batch.num_candidates, scores.shape[1]))
        return self._to_host(best.indices), self._to_host(best.values)

    def _indices(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._kernels.device)

    def _logprobs_to_host(self, tensors: LogprobTensors) -> LogprobTensors:
        return LogprobTensors(
            self._to_host(tensors.token_ids), self._to_host(tensors.logprobs), self._to_host(tensors.ranks)
        )

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Start the copy; it is there once the step's timing is done."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
