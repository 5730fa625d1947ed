"""Builds a rank's runner: model, weights, cache. The slow part of start-up."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from common.stopwatch import Stopwatch
from worker.attention.interface import CacheBuilder, make_builders
from worker.core.cache.pools import PoolKind, PoolPlan, bytes_of
from worker.grammars.compiler import GrammarCompiler
from worker.grammars.masks import SlotGrammars
from worker.kernels.select import Kernels
from worker.kernels.step import StepBuffers
from worker.layers.setup import LayerSetup
from worker.loader.checkpoint import Checkpoint
from worker.loader.config import ModelConfig
from worker.loader.errors import ModelConfigError, WeightsError
from worker.loader.load_config import load_model_config
from worker.loader.open import as_stored, open_checkpoint
from worker.loader.source import ModelSource, resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.models.base import CausalLM
from worker.models.registry import create_model
from worker.models.weights import fill_with_noise, load_weights, pack_weights
from worker.parallel.group import Group
from worker.runner.config import DTYPES, MemoryReport, ModelInfo, RunnerConfig
from worker.runner.entries import EntryMover
from worker.runner.forward import ForwardPass
from worker.runner.graphs import GraphSizes
from worker.runner.memory import GIB, physical_cores, plan_on_cpu, plan_on_gpu
from worker.runner.model_runner import ModelRunner, RunnerParts
from worker.runner.prepare import StepPreparer
from worker.runner.probe import dummy_batch, largest_batch, measure_peak
from worker.runner.slots import SlotState

logger = logging.getLogger(__name__)

NOTHING = PoolPlan(num_blocks=0, num_groups=0, num_page_bytes=0, num_state_bytes=0)
"""The spare block and group alone: what a dummy step needs."""

NO_GRAPHS = GraphSizes()

MAX_FILLERS = 8
"""Threads that fill masks of grammars: more would keep the cores from what feeds the device."""


def resolve_device(name: str, local_rank: int) -> torch.device:
    """`auto` is CUDA where the host has a GPU for this rank of it. Raises ModelConfigError."""
    if name == "cpu" or (name == "auto" and torch.cuda.device_count() <= local_rank):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ModelConfigError(f"device {name!r} is not known (auto, cpu, cuda)")
    if torch.cuda.device_count() <= local_rank:
        raise ModelConfigError(
            f"no CUDA device for rank {local_rank} of this host: {torch.cuda.device_count()} are visible"
        )
    return torch.device("cuda", local_rank)


def resolve_dtype(name: str, device: torch.device, checkpoint: str) -> torch.dtype:
    """Raises ModelConfigError for a dtype that is not known."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    if name not in DTYPES:
        raise ModelConfigError(f"dtype {name!r} is not supported ({', '.join(DTYPES)})")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


@torch.inference_mode()
def build_runner(
    config: RunnerConfig, tp: Group, local_rank: int = 0, watch: Stopwatch | None = None
) -> tuple[ModelRunner, ModelInfo]:
    """`watch` is told of each part. Raises ModelError, KernelBackendError, CacheMemoryError or ValueError, each with
    what to do about it."""
    watch = watch or Stopwatch()
    device = resolve_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = resolve_model(config.model)
    checkpoint, model_config = _read(source, config)
    for remark in model_config.remarks if tp.rank == 0 else ():
        logger.warning("%s", remark)
    max_model_len = _max_model_len(config, model_config)
    dtype = resolve_dtype(config.dtype, device, model_config.dtype)
    kernels = Kernels(device, config.kernel_backend)
    model = _create(replace(model_config, max_model_len=max_model_len), LayerSetup(kernels, tp, dtype))
    watch.lap("model")
    weights = _load(model, checkpoint, model_config, config, device, watch)

    builders = make_builders(model.cache_layers(), kernels, config.block_size)
    specs = [spec for builder in builders for spec in builder.pool_specs()]
    blocks_per_seq = -(-max_model_len // config.block_size)
    grammars = _grammars(source, model_config, device) if tp.rank == 0 else None

    sizes = _graph_sizes(config, device)

    def assembled(plan: PoolPlan, num_host_blocks: int) -> ModelRunner:
        return assemble(
            config, kernels, tp, model, builders, plan, num_host_blocks, max_model_len, grammars, sizes or NO_GRAPHS
        )

    activations = graphs = 0
    if config.num_blocks is not None:
        plan = PoolPlan.of(specs, config.num_blocks, config.max_num_seqs)
    elif device.type == "cpu":
        plan = plan_on_cpu(config, specs, config.max_num_seqs * blocks_per_seq)
    else:
        largest = largest_batch(config.max_num_batched_tokens, config.max_num_seqs, max_model_len)
        peak = measure_peak(assembled(NOTHING, 0), largest, sizes.largest() if sizes else None, device)
        activations, graphs = peak.activations, peak.graphs
        plan = plan_on_gpu(config, specs, peak.used, peak.total)
    plan = PoolPlan.of(specs, tp.minimum(plan.num_blocks, device), config.max_num_seqs)
    bytes_per_block = bytes_of(specs, PoolKind.PAGE)
    num_host_blocks = int(config.swap_space_gib * GIB) // bytes_per_block
    runner = assembled(plan, num_host_blocks)
    watch.lap("cache")
    # Libraries set themselves up at their first call; no request should wait for that.
    runner.execute(dummy_batch(1, config.max_num_seqs, max_model_len))
    if device.type == "cuda":
        longest = min(config.max_num_batched_tokens, max_model_len)
        runner.execute(dummy_batch(longest, config.max_num_seqs, max_model_len, num_rows=1))
    watch.lap("first step")
    if sizes is not None:
        runner.capture(sizes)
        watch.lap("graphs")

    memory = MemoryReport(
        weights=weights,
        activations=activations,
        graphs=graphs,
        kv_cache=plan.num_page_bytes,
        state=plan.num_state_bytes,
        swap=num_host_blocks * bytes_per_block,
        num_cache_tokens=plan.num_blocks * config.block_size,
    )
    dtype_name = str(dtype).removeprefix("torch.")
    logger.info(
        "%s on %s in %s: weights %.2f GiB, activations %.2f GiB, CUDA graphs %.2f GiB, "
        "KV cache %.2f GiB = %d blocks of %d = %d tokens, swap %.2f GiB",
        model_config.architecture, device, dtype_name,
        weights / GIB, activations / GIB, graphs / GIB,
        memory.kv_cache / GIB, plan.num_blocks, config.block_size, memory.num_cache_tokens, memory.swap / GIB,
    )  # fmt: skip
    return runner, ModelInfo(
        config=model_config,
        dtype=dtype_name,
        device=str(device),
        kernels=kernels.describe(),
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        num_groups=plan.num_groups,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        memory=memory,
    )


def assemble(
    config: RunnerConfig,
    kernels: Kernels,
    tp: Group,
    model: CausalLM,
    builders: Sequence[CacheBuilder],
    plan: PoolPlan,
    num_host_blocks: int,
    max_model_len: int,
    grammars: SlotGrammars | None = None,
    sizes: GraphSizes = NO_GRAPHS,
) -> ModelRunner:
    """A runner of `model` over caches of this size, in place of those that the builders had before.

    `sizes`: of the graphs that `ModelRunner.capture` will be asked for.
    """
    for builder in builders:
        builder.allocate(plan)
    blocks_per_seq = -(-max_model_len // config.block_size)
    slots = SlotState(
        config.max_num_seqs, blocks_per_seq, max_model_len, model.vocab_size, kernels.device,
        spare_block=plan.num_blocks, spare_group=plan.num_groups,
    )  # fmt: skip
    buffers = StepBuffers.allocate(
        config.max_num_batched_tokens, config.max_num_seqs, blocks_per_seq, plan.num_blocks, kernels.device
    )
    forward = ForwardPass(model, builders, buffers, max_model_len)
    preparer = StepPreparer(slots, buffers, kernels, config.block_size, sizes.rows if forward.can_capture else ())
    mover = EntryMover(builders, kernels, num_host_blocks)
    return ModelRunner(RunnerParts(kernels, tp, model, builders, mover, slots, preparer, forward, grammars))


def _graph_sizes(config: RunnerConfig, device: torch.device) -> GraphSizes | None:
    if device.type != "cuda" or config.enforce_eager:
        return None
    return GraphSizes.up_to(config.max_num_seqs, config.max_num_batched_tokens)


def _max_model_len(config: RunnerConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ModelConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own {model.max_model_len}"
        )
    return config.max_model_len


def _read(source: ModelSource, config: RunnerConfig) -> tuple[Checkpoint | None, ModelConfig]:
    """Configuration and opened checkpoint; none for dummy weights."""
    model_config = load_model_config(source)
    if config.load_format == "dummy":
        return None, model_config
    if config.load_format not in ("auto", source.format.value):
        raise ModelConfigError(f"{source.path} is no {config.load_format} model but a {source.format.value} one")
    checkpoint = open_checkpoint(source, model_config)
    return checkpoint, as_stored(model_config, checkpoint)


def _create(config: ModelConfig, setup: LayerSetup) -> CausalLM:
    try:
        return create_model(config, setup)
    except RuntimeError as error:
        # Torch's words when there is no memory, on a GPU and on a CPU; the first line has the sizes.
        reason = str(error).splitlines()[0]
        raise WeightsError(f"the model's weights do not fit into the memory of {setup.device}: {reason}") from error


def _load(
    model: CausalLM, checkpoint: Checkpoint | None, model_config: ModelConfig, config: RunnerConfig,
    device: torch.device, watch: Stopwatch,
) -> int:  # fmt: skip
    """Fill and pack the weights; their bytes as loaded."""
    if checkpoint is None:
        fill_with_noise(model, config.seed)
    else:
        load_weights(model, checkpoint, model_config, device)
    watch.lap("weights")
    num_bytes = pack_weights(model)
    watch.lap("packing")
    return num_bytes


def _grammars(source: ModelSource, model: ModelConfig, device: torch.device) -> SlotGrammars:
    compiler = GrammarCompiler(
        lambda: load_tokenizer_files(source).files["tokenizer.json"], model.vocab_size, model.eos_token_ids
    )
    return SlotGrammars(compiler, model.vocab_size, device, max(1, min(MAX_FILLERS, physical_cores() // 2)))
