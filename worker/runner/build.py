"""Builds a rank's runner: model, weights, cache. The slow part of start-up."""

import logging

import torch

from worker.attention.interface import make_builders
from worker.core.cache.pools import PoolKind, bytes_of
from worker.grammars.compiler import GrammarCompiler
from worker.grammars.masks import SlotGrammars
from worker.kernels.native.build import this_cpu
from worker.kernels.native.tape import UnrecordableError
from worker.kernels.select import Kernels
from worker.lap_watch import LapWatch
from worker.layers.setup import LayerSetup
from worker.loader.config import CommonConfig
from worker.loader.errors import ModelConfigError
from worker.loader.source import ModelSource
from worker.loader.tokenizer import load_tokenizer_files
from worker.models.base import CausalLM
from worker.parallel.group import ALONE, Group
from worker.runner.assembly import Assembly, SizedCache, compile_ahead, size_cache, warm_up
from worker.runner.config import MemoryReport, ModelInfo, RunnerConfig
from worker.runner.drafting.drafting import DraftModel
from worker.runner.drafting.load_draft import load_draft
from worker.runner.drafting.load_eagle3 import load_eagle3
from worker.runner.drafting.load_mtp import load_mtp
from worker.runner.dtypes import is_emulated, resolve_dtype
from worker.runner.fit import check_devices, check_fit
from worker.runner.graphs import MANY_TOKENS, GraphSizes
from worker.runner.load import OpenedModel, layer_setup, load_model, open_model
from worker.runner.memory import GIB, physical_cores
from worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


MOST_TAPED_ROWS = 32
"""Uniform rows of a CPU's steps that are recorded, which are not padded. With more, what that saves is little beside
the products."""
MAX_FILLERS = 8
"""Threads that fill masks of grammars: more would keep the cores from what feeds the device."""


def resolve_device(name: str, local_rank: int) -> torch.device:
    """`auto` is CUDA where the host has a GPU. Raises ModelConfigError where it has none for this rank of it."""
    if name not in ("auto", "cpu", "cuda"):
        raise ModelConfigError(f"device {name!r} is not known (auto, cpu, cuda)")
    if name == "cpu" or (name == "auto" and not torch.cuda.device_count()):
        return torch.device("cpu")
    check_devices(torch.cuda.device_count(), local_rank)
    return torch.device("cuda", local_rank)


@torch.inference_mode()
def build_runner(
    config: RunnerConfig,
    tp: Group,
    local_rank: int = 0,
    watch: LapWatch | None = None,
    *,
    ep: Group = ALONE,
    dp: Group = ALONE,
) -> tuple[ModelRunner, ModelInfo]:
    """`watch` is told of each part. All ranks of `ep` must call alike. Raises ModelError, KernelBackendError,
    CacheMemoryError or ValueError, each with what to do about it."""
    watch = watch or LapWatch()
    device = resolve_device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    opened = open_model(config)
    model_config = opened.config
    for remark in model_config.remarks if tp.rank == 0 else ():
        logger.warning("%s", remark)
    check_fit(model_config, config)
    max_model_len = config.max_model_len or model_config.max_model_len
    dtype = resolve_dtype(config.dtype, device, model_config.dtype)
    if tp.rank == 0 and device.type == "cpu" and is_emulated(dtype, this_cpu()):
        logger.warning("%s is emulated on this processor: float32 is several times as fast", config.dtype)
    kernels = Kernels(device, config.kernel_backend)
    setup = layer_setup(opened, config, kernels, tp, dtype, ep, dp)
    model, weights = load_model(opened, config, setup, max_model_len, watch)
    draft, draft_weights = _draft_model(config, opened, setup, model, max_model_len, watch)

    assembly = Assembly(
        config=config,
        kernels=kernels,
        tp=tp,
        model=model,
        builders=make_builders(model.cache_layers(), kernels, config.block_size),
        max_model_len=max_model_len,
        grammars=_grammars(opened.source, model_config, device) if tp.rank == 0 else None,
        graph_sizes=_graph_sizes(config, device, is_alone=tp.size == config.dp_size == 1),
        draft=draft,
    )
    compile_ahead(assembly, watch)
    cache = size_cache(assembly)
    runner = assembly.runner(cache.plan, cache.num_host_blocks)
    watch.lap("cache")
    warm_up(assembly, runner)
    watch.lap("first step")
    if assembly.graph_sizes is not None:
        _capture(runner, assembly.graph_sizes)
        watch.lap("graphs")
    logger.info("quantization of weights: %s", setup.quantization)
    info = _report(assembly, cache, model_config, str(dtype).removeprefix("torch."), weights + draft_weights)
    return runner, info


def _draft_model(
    config: RunnerConfig, opened: OpenedModel, setup: LayerSetup, model: CausalLM, max_model_len: int, watch: LapWatch
) -> tuple[DraftModel | None, int]:
    """Who drafts beside `model`, if somebody does in the ranks, and the bytes of its weights."""
    match config.drafter:
        case "draft":
            return load_draft(config, opened.config, setup, max_model_len, watch)
        case "eagle3":
            return load_eagle3(config, opened.config, setup, model, max_model_len, watch)
        case "mtp":
            return load_mtp(opened, config, setup, model, max_model_len, watch)
        case None:
            return None, 0


def _report(assembly: Assembly, cache: SizedCache, model_config: CommonConfig, dtype: str, weights: int) -> ModelInfo:
    config, plan, device = assembly.config, cache.plan, assembly.kernels.device
    num_checkpoints = config.num_state_checkpoints if plan.num_groups else 0
    memory = MemoryReport(
        weights=weights,
        activations=cache.activations,
        graphs=cache.graphs,
        kv_cache=plan.num_page_bytes,
        state=plan.num_state_bytes,
        swap=cache.num_host_blocks * bytes_of(assembly.specs, PoolKind.PAGE),
        num_cache_tokens=plan.num_blocks * config.block_size,
    )
    logger.info(
        "%s on %s in %s: weights %.2f GiB, activations %.2f GiB, CUDA graphs %.2f GiB, "
        "KV cache %.2f GiB = %d blocks of %d = %d tokens, state %.2f GiB = %d groups, swap %.2f GiB",
        model_config.architecture, device, dtype,
        weights / GIB, memory.activations / GIB, memory.graphs / GIB,
        memory.kv_cache / GIB, plan.num_blocks, config.block_size, memory.num_cache_tokens,
        memory.state / GIB, plan.num_groups, memory.swap / GIB,
    )  # fmt: skip
    return ModelInfo(
        config=model_config,
        dtype=dtype,
        device=str(device),
        kernels=assembly.kernels.describe(),
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        num_groups=plan.num_groups - num_checkpoints,
        num_checkpoints=num_checkpoints,
        num_host_blocks=cache.num_host_blocks,
        max_model_len=assembly.max_model_len,
        memory=memory,
    )


def _capture(runner: ModelRunner, sizes: GraphSizes) -> None:
    try:
        runner.capture(sizes)
    except UnrecordableError as error:
        logger.info("no tapes: %s", error)


def _graph_sizes(config: RunnerConfig, device: torch.device, *, is_alone: bool) -> GraphSizes | None:
    if config.enforce_eager or config.model_impl != "fissile":
        return None  # what `transformers` launches may wait for the device, which cannot be captured
    if device.type == "cpu":
        rows = range(1, 1 + min(MOST_TAPED_ROWS, config.max_num_seqs))
        return GraphSizes(tuple(rows)) if is_alone and config.drafter is None else None
    sizes = GraphSizes.up_to(config.max_num_seqs, config.max_num_batched_tokens)
    if config.dp_size == 1:
        return sizes
    # In larger ones the last layer has fewer tokens than the others, and not as many as that of a rank without a graph.
    return GraphSizes(sizes.rows, tuple(size for size in sizes.tokens if size <= MANY_TOKENS))


def _grammars(source: ModelSource, model: CommonConfig, device: torch.device) -> SlotGrammars:
    compiler = GrammarCompiler(
        lambda: load_tokenizer_files(source).files["tokenizer.json"], model.vocab_size, model.eos_token_ids
    )
    return SlotGrammars(compiler, model.vocab_size, device, max(1, min(MAX_FILLERS, physical_cores() // 2)))
