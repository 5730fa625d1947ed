"""Builds a rank's runner: model, weights, cache. The slow part of start-up."""

import logging
from dataclasses import replace
from typing import cast

import torch

from common.stopwatch import Stopwatch
from worker.attention.interface import make_builders
from worker.core.cache.pools import PoolKind, bytes_of
from worker.grammars.compiler import GrammarCompiler
from worker.grammars.masks import SlotGrammars
from worker.kernels.native.build import this_cpu
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Grouped, Quantization
from worker.layers.experts import RoutedExperts
from worker.layers.setup import LayerSetup, quantized_kind
from worker.loader.checkpoint import Checkpoint
from worker.loader.config import CommonConfig, GenericConfig, ModelConfig
from worker.loader.errors import ModelConfigError, WeightsError
from worker.loader.load_config import load_common_config
from worker.loader.open import as_stored, open_checkpoint
from worker.loader.quantized.schemes import QuantizedWeights
from worker.loader.source import ModelSource, SourceFormat, resolve_model
from worker.loader.tokenizer import load_tokenizer_files
from worker.models.base import CausalLM
from worker.models.registry import create_model
from worker.models.weights import fill_with_noise, load_weights, pack_weights
from worker.parallel.group import ALONE, Group
from worker.runner.assembly import Assembly, SizedCache, compile_ahead, size_cache, warm_up
from worker.runner.config import MemoryReport, ModelInfo, RunnerConfig
from worker.runner.dtypes import is_emulated, resolve_dtype
from worker.runner.graphs import MANY_TOKENS, GraphSizes
from worker.runner.memory import GIB, physical_cores
from worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


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


def resolve_quantization(
    name: str, kernels: Kernels, tp: Group, dtype: torch.dtype, stored: type[Blocks] | type[Grouped] | None
) -> Quantization:
    """`auto` keeps the numbers that a checkpoint has (`stored`: their kind) where kernels read them. Raises
    ModelConfigError for what cannot be."""
    kind = quantized_kind(kernels, dtype, 32, 32)
    if name == "auto":
        # What is in blocks can be grouped, and not the other way round. On a CPU ranks that share a model have floats.
        is_read = stored is not None and (kind is Grouped or (kind is stored and tp.size == 1))
        return "stored" if is_read else "none"
    if name not in ("none", "int8", "int4"):
        raise ModelConfigError(f"quantization {name!r} is not supported (auto, none, int8, int4)")
    if name != "none" and kind is None:
        raise ModelConfigError(
            f"quantization {name} needs native kernels, which are for CPUs and dtype float32, or Triton's, which are "
            f"for NVIDIA GPUs and dtype bfloat16 or float16"
        )
    return cast(Quantization, name)


@torch.inference_mode()
def build_runner(
    config: RunnerConfig,
    tp: Group,
    local_rank: int = 0,
    watch: Stopwatch | None = None,
    *,
    ep: Group = ALONE,
    dp: Group = ALONE,
) -> tuple[ModelRunner, ModelInfo]:
    """`watch` is told of each part. All ranks of `ep` must call alike. Raises ModelError, KernelBackendError,
    CacheMemoryError or ValueError, each with what to do about it."""
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
    if tp.rank == 0 and device.type == "cpu" and is_emulated(dtype, this_cpu()):
        logger.warning("%s is emulated on this processor: float32 is several times as fast", config.dtype)
    kernels = Kernels(device, config.kernel_backend)
    quantized = model_config.quantized
    stored = None if checkpoint is None else _stored_kind(source, quantized)
    quantization = resolve_quantization(config.quantization, kernels, tp, dtype, stored)
    setup = LayerSetup(
        kernels, tp, dtype, quantization, ep, dp,
        cache_dtype=torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else None,
        has_cache_scales=quantized is not None and quantized.has_cache_scales,
    )  # fmt: skip
    model, weights = _load(checkpoint, replace(model_config, max_model_len=max_model_len), config, setup, watch)

    assembly = Assembly(
        config=config,
        kernels=kernels,
        tp=tp,
        model=model,
        builders=make_builders(model.cache_layers(), kernels, config.block_size),
        max_model_len=max_model_len,
        grammars=_grammars(source, model_config, device) if tp.rank == 0 else None,
        graph_sizes=_graph_sizes(config, device),
    )
    compile_ahead(assembly, watch)
    cache = size_cache(assembly)
    runner = assembly.runner(cache.plan, cache.num_host_blocks)
    watch.lap("cache")
    warm_up(assembly, runner)
    watch.lap("first step")
    if assembly.graph_sizes is not None:
        runner.capture(assembly.graph_sizes)
        watch.lap("graphs")
    logger.info("quantization of weights: %s", quantization)
    info = _report(assembly, cache, model_config, str(dtype).removeprefix("torch."), weights)
    return runner, info


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
        "KV cache %.2f GiB = %d blocks of %d = %d tokens, swap %.2f GiB",
        model_config.architecture, device, dtype,
        weights / GIB, memory.activations / GIB, memory.graphs / GIB,
        memory.kv_cache / GIB, plan.num_blocks, config.block_size, memory.num_cache_tokens, memory.swap / GIB,
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


def _graph_sizes(config: RunnerConfig, device: torch.device) -> GraphSizes | None:
    if device.type != "cuda" or config.enforce_eager or config.model_impl != "fissile":
        return None  # what `transformers` launches may wait for the device, which cannot be captured
    sizes = GraphSizes.up_to(config.max_num_seqs, config.max_num_batched_tokens)
    if config.dp_size == 1:
        return sizes
    # In larger ones the last layer has fewer tokens than the others, and not as many as that of a rank without a graph.
    return GraphSizes(sizes.rows, tuple(size for size in sizes.tokens if size <= MANY_TOKENS))


def _max_model_len(config: RunnerConfig, model: CommonConfig) -> int:
    if config.max_model_len is None:
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ModelConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own {model.max_model_len}"
        )
    return config.max_model_len


def _read(source: ModelSource, config: RunnerConfig) -> tuple[Checkpoint | None, CommonConfig]:
    """Configuration and opened checkpoint; none for dummy weights."""
    model_config = load_common_config(source, config.model_impl)
    if model_config.quantized is not None and (config.kv_cache_dtype == "auto" or config.load_format == "dummy"):
        # Nobody reads the scales.
        model_config = replace(model_config, quantized=replace(model_config.quantized, has_cache_scales=False))
    if config.load_format == "dummy":
        return None, model_config
    if config.load_format not in ("auto", source.format.value):
        raise ModelConfigError(f"{source.path} is no {config.load_format} model but a {source.format.value} one")
    checkpoint = open_checkpoint(source, model_config)
    return checkpoint, as_stored(model_config, checkpoint) if isinstance(model_config, ModelConfig) else model_config


def _load(
    checkpoint: Checkpoint | None, model_config: CommonConfig, config: RunnerConfig, setup: LayerSetup, watch: Stopwatch
) -> tuple[CausalLM, int]:
    """The model, its weights filled and packed, and their bytes as loaded."""
    if isinstance(model_config, GenericConfig):
        from worker.models.generic import load_generic  # takes seconds to import

        generic = load_generic(model_config, setup, checkpoint, config.seed)
        watch.lap("model and weights")
        return generic, sum(weight.nbytes for weight in generic.parameters())
    assert isinstance(model_config, ModelConfig)
    model = _create(model_config, setup)
    if config.expert_parallel and not any(isinstance(module, RoutedExperts) for module in model.modules()):
        raise ModelConfigError(f"expert_parallel: {model_config.architecture} has no experts to spread over ranks")
    watch.lap("model")
    if checkpoint is None:
        fill_with_noise(model, config.seed)
    else:
        load_weights(model, checkpoint, model_config, setup.device)
    watch.lap("weights")
    num_bytes = pack_weights(model)
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()  # pieces that were joined
    watch.lap("packing")
    return model, num_bytes


def _stored_kind(source: ModelSource, quantized: QuantizedWeights | None) -> type[Blocks] | type[Grouped] | None:
    """Of a checkpoint's numbers; None where they are plain."""
    if source.format is SourceFormat.GGUF or (quantized is not None and quantized.is_in_blocks):
        return Blocks
    return None if quantized is None else Grouped


def _create(config: ModelConfig, setup: LayerSetup) -> CausalLM:
    try:
        return create_model(config, setup)
    except RuntimeError as error:
        # Torch's words when there is no memory, on a GPU and on a CPU; the first line has the sizes.
        reason = str(error).splitlines()[0]
        raise WeightsError(f"the model's weights do not fit into the memory of {setup.device}: {reason}") from error


def _grammars(source: ModelSource, model: CommonConfig, device: torch.device) -> SlotGrammars:
    compiler = GrammarCompiler(
        lambda: load_tokenizer_files(source).files["tokenizer.json"], model.vocab_size, model.eos_token_ids
    )
    return SlotGrammars(compiler, model.vocab_size, device, max(1, min(MAX_FILLERS, physical_cores() // 2)))
