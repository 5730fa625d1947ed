"""From a model's name to layers in memory, their weights filled and packed."""

from dataclasses import dataclass, replace
from typing import cast

import torch

from worker.kernels.gqa import GQA, INT8_TOKENS, GqaSpec
from worker.kernels.native.build import this_cpu
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Grouped, Quantization
from worker.lap_watch import LapWatch
from worker.layers.experts import RoutedExperts
from worker.layers.setup import LayerSetup, quantized_kind
from worker.loader.checkpoint import Checkpoint
from worker.loader.config import CommonConfig, GenericConfig, ModelConfig
from worker.loader.errors import ModelConfigError, WeightsError
from worker.loader.load_config import load_common_config
from worker.loader.open import as_stored, open_checkpoint
from worker.loader.quantized.schemes import QuantizedWeights
from worker.loader.source import ModelSource, SourceFormat, resolve_model
from worker.models.base import CausalLM
from worker.models.registry import create_model
from worker.models.weights import fill_with_noise, load_weights, pack_weights
from worker.parallel.group import ALONE, Group
from worker.runner.config import RunnerConfig
from worker.runner.fit import check_load_format


@dataclass(frozen=True, slots=True)
class OpenedModel:
    source: ModelSource
    checkpoint: Checkpoint | None
    """None for dummy weights."""
    config: CommonConfig


def open_model(config: RunnerConfig) -> OpenedModel:
    """Find the files of `config.model`, and read what it is. Raises ModelError."""
    source = resolve_model(config.model)
    model_config = load_common_config(source, config.model_impl)
    if model_config.quantized is not None and (config.kv_cache_dtype != "fp8" or config.load_format == "dummy"):
        # Nobody reads the scales.
        model_config = replace(model_config, quantized=replace(model_config.quantized, has_cache_scales=False))
    if config.load_format == "dummy":
        return OpenedModel(source, None, model_config)
    check_load_format(source, config.load_format)
    checkpoint = open_checkpoint(source, model_config)
    if isinstance(model_config, ModelConfig):
        model_config = as_stored(model_config, checkpoint)
    return OpenedModel(source, checkpoint, model_config)


def layer_setup(
    opened: OpenedModel, config: RunnerConfig, kernels: Kernels, tp: Group, dtype: torch.dtype, ep: Group = ALONE,
    dp: Group = ALONE,
) -> LayerSetup:  # fmt: skip
    """What its layers are made with. Raises ModelConfigError."""
    quantized = opened.config.quantized
    stored = None if opened.checkpoint is None else _stored_kind(opened.source, quantized)
    quantization = resolve_quantization(config.quantization, kernels, tp, dtype, stored)
    of_experts = _of_experts(quantization, config.quantization, kernels, stored, quantized)
    return LayerSetup(
        kernels, tp, dtype, quantization, of_experts, ep, dp,
        cache_dtypes=_cache_dtypes(opened.config, config, quantization, kernels, dtype),
        has_cache_scales=quantized is not None and quantized.has_cache_scales,
        num_drafts=config.num_speculative_tokens,
    )  # fmt: skip


def load_model(
    opened: OpenedModel, config: RunnerConfig, setup: LayerSetup, max_model_len: int, watch: LapWatch
) -> tuple[CausalLM, int]:
    """The model, its weights filled and packed, and their bytes as loaded. Raises ModelError."""
    checkpoint, model_config = opened.checkpoint, replace(opened.config, max_model_len=max_model_len)
    if isinstance(model_config, GenericConfig):
        from worker.models.generic import load_generic  # takes seconds to import

        generic = load_generic(model_config, setup, checkpoint, config.seed)
        watch.lap("model and weights")
        return generic, sum(weight.nbytes for weight in generic.parameters())
    assert isinstance(model_config, ModelConfig)
    model = _create(model_config, setup)
    watch.lap("model")
    fill(model, checkpoint, model_config, config.seed, setup)
    watch.lap("weights")
    num_bytes = pack_weights(model)
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()  # pieces that were joined
    watch.lap("packing")
    return model, num_bytes


def fill(
    model: CausalLM,
    checkpoint: Checkpoint | None,
    model_config: ModelConfig,
    seed: int,
    setup: LayerSetup,
    beginnings: tuple[str, ...] = ("",),
) -> None:
    """With a checkpoint's weights, or, without one, with noise. `beginnings`: see `load_weights`. Raises
    WeightsError."""
    if checkpoint is None:
        fill_with_noise(model, seed)
    else:
        load_weights(model, checkpoint, model_config, setup.device, beginnings)


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


def _cache_dtypes(
    model: CommonConfig, config: RunnerConfig, quantization: Quantization, kernels: Kernels, dtype: torch.dtype
) -> tuple[torch.dtype, ...]:
    """Before that of activations. Weights of whole numbers on a CPU round activations to 8 bits anyway: beside them a
    cache of 8 bits loses next to nothing, and attention reads a quarter. A bias makes some components of all keys far
    larger than the others, for which the scale that they share is then too coarse. Without VNNI it wins less, and lost
    more of what was measured. Raises ModelConfigError for what no layer could have."""
    name, has_blocks = config.kv_cache_dtype, config.block_size % INT8_TOKENS == 0
    if name == "auto":
        if quantization == "none" or dtype != torch.float32:
            return ()
        has_bias = isinstance(model, ModelConfig) and (model.attention_bias or model.qkv_bias)
        is_good = has_blocks and not has_bias and "avx512_vnni" in this_cpu()
        return (torch.int8, torch.bfloat16) if is_good else (torch.bfloat16,)
    asked = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(name)
    if asked is None:
        return ()
    if kernels.find(GQA, GqaSpec(1, 1, 64, 1.0, asked), dtype) is None:
        raise ModelConfigError(f"kv-cache-dtype {name} needs native kernels, which are for CPUs and dtype float32")
    if asked == torch.int8 and not has_blocks:
        raise ModelConfigError(f"kv-cache-dtype int8 needs a block-size that is a multiple of {INT8_TOKENS}")
    return (asked,)


def _of_experts(
    quantization: Quantization, name: str, kernels: Kernels, stored: type[Blocks] | type[Grouped] | None,
    quantized: QuantizedWeights | None,
) -> Quantization:  # fmt: skip
    """Beside linear layers with `quantization`. A CPU keeps a checkpoint's blocks whatever becomes of those, as torch's
    kernels and ranks that share a model read them, too; a GPU cuts no experts."""
    if kernels.device.type != "cpu":
        return "stored" if quantization == "stored" else "none"
    if name != "auto":
        return quantization
    is_kept = stored is Blocks or (stored is Grouped and quantized is not None and quantized.has_fp4_experts)
    return "stored" if is_kept else "none"


def _stored_kind(source: ModelSource, quantized: QuantizedWeights | None) -> type[Blocks] | type[Grouped] | None:
    """Of a checkpoint's numbers; None where they are plain."""
    if source.format is SourceFormat.GGUF or (quantized is not None and quantized.is_in_blocks):
        return Blocks
    return None if quantized is None else Grouped


def has_experts(model: CausalLM) -> bool:
    return any(isinstance(module, RoutedExperts) for module in model.modules())


def _create(config: ModelConfig, setup: LayerSetup) -> CausalLM:
    try:
        return create_model(config, setup)
    except RuntimeError as error:
        # Torch's words when there is no memory, on a GPU and on a CPU; the first line has the sizes.
        reason = str(error).splitlines()[0]
        raise WeightsError(f"the model's weights do not fit into the memory of {setup.device}: {reason}") from error
