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
from worker.runner.inputs import InputBuilder, StepInputs
from worker.runner.sampler import FAILED, Sampler, SamplingRows
from worker.runner.slots import SlotState
from worker.runner.timer import StepTimer, Timing

NOT_FINITE = "the model's logits are not finite"


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


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that the device may still be running. Results are on their way to the host."""

    batch: ScheduledBatch
    sampled_rows: list[int]
    token_ids: Tensor
    """int64 [R] on the host, valid when `timing` is done; FAILED marks a row without a token."""
    candidates: tuple[Tensor, Tensor] | None
    """(ids, log probabilities) of the beam rows, [beam rows, num_candidates] on the host."""
    timing: Timing

    def result(self) -> BatchOutput:
        """Wait for the device, then translate."""
        seconds = self.timing.wait()
        tokens: list[list[int]] = [[] for _ in self.batch.slots]
        errors: dict[int, str] = {}
        for row, token in zip(self.sampled_rows, self.token_ids.tolist(), strict=True):
            if token == FAILED:
                errors[row] = NOT_FINITE
            else:
                tokens[row] = [token]
        candidates: dict[int, list[tuple[int, float]]] = {}
        if self.candidates is not None:
            ids, scores = (tensor.tolist() for tensor in self.candidates)
            for row, row_ids, row_scores in zip(self.batch.beam_rows, ids, scores, strict=True):
                tokens[row] = []
                if row not in errors:
                    candidates[row] = list(zip(row_ids, row_scores, strict=True))
        return BatchOutput(self.batch.step, tokens, errors, candidates, seconds)


class ModelRunner:
    """Runs steps in the order of `submit`. Not thread-safe: one thread owns it."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._kernels, self._model, self._slots = parts.kernels, parts.model, parts.slots
        self._inputs = InputBuilder(parts.slots, parts.builder, parts.block_size, parts.kernels.device)
        self._sampler = Sampler(parts.kernels)
        self._timer = StepTimer(parts.kernels.device)

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step. On a GPU this returns while the device still works; on a CPU the step is done."""
        timing = self._timer.start()
        self._move_blocks(batch)
        inputs = self._inputs.prepare(batch)
        with forward_context(inputs.context):
            hidden = self._model.forward(inputs.input_ids, inputs.context.positions)
        return self._postprocess(batch, inputs, hidden, timing)

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

    def _postprocess(self, batch: ScheduledBatch, inputs: StepInputs, hidden: Tensor, timing: Timing) -> PendingStep:
        rows, candidates = inputs.sampled_rows, None
        token_ids = torch.empty(0, dtype=torch.int64)
        if rows:
            logits = self._model.logits(hidden.index_select(0, inputs.logit_tokens)).float()
            token_ids = self._parts.parallel.broadcast(self._sampler.sample(logits, self._sampling_rows(batch, inputs)))
            self._slots.last_tokens.index_copy_(0, inputs.sampled_slots, token_ids.clamp(min=0))
            if batch.beam_rows:
                candidates = self._candidates(batch, rows, logits)
            token_ids = self._to_host(token_ids)
        timing.stop()
        return PendingStep(batch, rows, token_ids, candidates, timing)

    def _sampling_rows(self, batch: ScheduledBatch, inputs: StepInputs) -> SamplingRows:
        return SamplingRows(
            [self._slots.sampling[batch.slots[row]] for row in inputs.sampled_rows],
            self._slots.integers.index_select(0, inputs.sampled_slots),
            self._slots.floats.index_select(0, inputs.sampled_slots),
            inputs.sampled_positions,
        )

    def _candidates(self, batch: ScheduledBatch, rows: list[int], logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best next tokens of the beam rows, which must all be sampling rows."""
        index = self._indices([rows.index(row) for row in batch.beam_rows])
        scores = torch.log_softmax(logits.index_select(0, index), -1)
        best = scores.topk(min(batch.num_candidates, scores.shape[1]))
        return self._to_host(best.indices), self._to_host(best.values)

    def _indices(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._kernels.device)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Start the copy; it is there once the step's timing is done."""
        if tensor.device.type == "cpu":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
