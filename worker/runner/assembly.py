"""From a loaded model to a runner: slots, buffers, and a cache as large as memory allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.attention.interface import CacheBuilder
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec, bytes_of
from worker.grammars.masks import SlotGrammars
from worker.kernels.select import Kernels
from worker.kernels.step import StepBuffers
from worker.lap_watch import LapWatch
from worker.models.base import CausalLM
from worker.models.state_head import StateHead
from worker.parallel.group import Group
from worker.runner.config import RunnerConfig
from worker.runner.drafting.drafting import Drafting, DraftingParts, DraftModel
from worker.runner.drafting.from_states import StateDrafting
from worker.runner.drafting.recurrent import RecurrentDrafting
from worker.runner.entries import EntryMover
from worker.runner.forward import ForwardPass
from worker.runner.graphs import GraphSizes, graph_contexts
from worker.runner.memory import GIB, CacheMemoryError, plan_on_cpu, plan_on_gpu
from worker.runner.model_runner import ModelRunner, RunnerParts
from worker.runner.prepare import StepPreparer
from worker.runner.probe import PeakMemory, dummy_batch, largest_batch, measure_peak
from worker.runner.rehearsal import compile_kernels
from worker.runner.slots import SlotState

NOTHING = PoolPlan(num_blocks=0, num_groups=0, num_page_bytes=0, num_state_bytes=0)
"""The spare block and group alone: what a dummy step needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What the runners of a model share, whatever the size of their caches. The builders serve the last one made."""

    config: RunnerConfig
    kernels: Kernels
    tp: Group
    model: CausalLM
    builders: Sequence[CacheBuilder]
    max_model_len: int
    grammars: SlotGrammars | None = None
    """On rank 0."""
    graph_sizes: GraphSizes | None = None
    """What `ModelRunner.capture` will be asked for; None: nothing."""
    draft: DraftModel | None = None

    @property
    def specs(self) -> list[PoolSpec]:
        specs = [spec for builder in self.builders for spec in builder.pool_specs()]
        return specs if self.draft is None else specs + self.draft.pool_specs()

    @property
    def all_builders(self) -> list[CacheBuilder]:
        """Those of the model, then those of the draft model."""
        return [*self.builders, *(self.draft.builders if self.draft is not None else ())]

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.config.block_size)

    def runner(self, plan: PoolPlan, num_host_blocks: int = 0) -> ModelRunner:
        """Over caches of this size, in place of those that the builders had before."""
        return ModelRunner(self.parts(plan, num_host_blocks))

    def parts(self, plan: PoolPlan, num_host_blocks: int = 0) -> RunnerParts:
        """See `runner`. Raises CacheMemoryError."""
        config, kernels = self.config, self.kernels
        self._allocate(plan)
        slots = SlotState(
            config.max_num_seqs, self.blocks_per_seq, self.max_model_len, self.model.vocab_size, kernels.device,
            spare_block=plan.num_blocks, spare_group=plan.num_groups,
        )  # fmt: skip
        buffers = StepBuffers.allocate(
            config.max_num_batched_tokens, config.max_num_seqs, self.blocks_per_seq, plan.num_blocks, kernels.device
        )
        can_capture = self.graph_sizes is not None and graph_contexts(self.builders, 1, self.max_model_len)
        padded = self.graph_sizes.rows if self.graph_sizes is not None and can_capture else ()
        preparer = StepPreparer(slots, buffers, kernels, config.block_size, padded)
        return RunnerParts(
            kernels=kernels,
            tp=self.tp,
            model=self.model,
            builders=self.builders,
            mover=EntryMover(self.all_builders, kernels, num_host_blocks),
            slots=slots,
            preparer=preparer,
            forward=ForwardPass(self.model, self.builders, preparer, self.max_model_len),
            grammars=self.grammars,
            drafting=None if self.draft is None else self._drafting(self.draft, preparer, slots),
        )

    def _drafting(self, draft: DraftModel, preparer: StepPreparer, slots: SlotState) -> Drafting:
        kind: type[Drafting] = RecurrentDrafting if draft.has_state else Drafting
        if isinstance(draft.model, StateHead):
            kind = StateDrafting
        return kind(DraftingParts(draft, preparer, slots, self.kernels, self.tp, self.max_model_len))

    def _allocate(self, plan: PoolPlan) -> None:
        try:
            for builder in self.builders:
                builder.allocate(plan)
            if self.draft is not None:
                self.draft.allocate(plan)
        except (RuntimeError, OSError) as error:  # torch's, and the system's
            size = f"{plan.num_blocks} blocks ({plan.num_page_bytes / GIB:.2f} GiB)"
            raise CacheMemoryError(
                f"a cache of {size} does not fit into the memory of {self.kernels.device}, use a smaller --num-blocks "
                f"or --kv-cache-gib: {str(error).splitlines()[0]}"
            ) from error


@dataclass(frozen=True, slots=True)
class SizedCache:
    """Bytes are this rank's."""

    plan: PoolPlan
    num_host_blocks: int
    activations: int = 0
    """Measured on a GPU; see `MemoryReport`."""
    graphs: int = 0


def size_cache(assembly: Assembly) -> SizedCache:
    """As configured, or as large as memory allows: on a GPU by running the largest step there can be, without a cache.
    All ranks get the least of what they could have. Raises CacheMemoryError."""
    config, specs, device = assembly.config, assembly.specs, assembly.kernels.device
    peak = None
    if device.type != "cpu" and (config.num_blocks is None or config.dp_size > 1):
        # All ranks that share experts make this step, also where the size of the cache was said for some of them.
        peak = _peak(assembly)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif peak is not None:
        num_blocks = plan_on_gpu(config, specs, peak.used, peak.total).num_blocks
    else:
        num_blocks = plan_on_cpu(config, specs, config.max_num_seqs * assembly.blocks_per_seq).num_blocks
    num_blocks = assembly.tp.minimum(num_blocks, device)
    plan = PoolPlan.of(specs, num_blocks, config.max_num_seqs, config.num_state_checkpoints)
    num_host_blocks = int(config.swap_space_gib * GIB) // bytes_of(specs, PoolKind.PAGE)
    return SizedCache(plan, num_host_blocks, peak.activations if peak else 0, peak.graphs if peak else 0)


def _peak(assembly: Assembly) -> PeakMemory:
    config, sizes = assembly.config, assembly.graph_sizes
    largest = largest_batch(
        config.max_num_batched_tokens, config.max_num_seqs, assembly.max_model_len, config.num_speculative_tokens
    )
    return measure_peak(assembly.runner(NOTHING), largest, sizes.largest() if sizes else None, assembly.kernels.device)


def compile_ahead(assembly: Assembly, watch: LapWatch) -> None:
    """What the kernels' backend compiles, all together; otherwise each of the first steps would wait for some of it."""
    compiler = assembly.kernels.compiler(torch.get_num_threads())
    if compiler is not None:
        max_logits = assembly.config.max_num_seqs * (1 + assembly.config.num_speculative_tokens)
        compile_kernels(compiler, assembly.parts(NOTHING), assembly.max_model_len, max_logits)
        watch.lap("kernels")


def warm_up(assembly: Assembly, runner: ModelRunner) -> None:
    """Libraries set themselves up at their first call; no request should wait for that."""
    config, max_model_len = assembly.config, assembly.max_model_len
    runner.execute(dummy_batch(1, config.max_num_seqs, max_model_len))
    if assembly.kernels.device.type == "cuda":
        longest = min(config.max_num_batched_tokens, max_model_len)
        runner.execute(dummy_batch(longest, config.max_num_seqs, max_model_len, num_rows=1))
