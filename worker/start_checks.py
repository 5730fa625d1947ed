"""What keeps a worker from starting and can be known before its ranks are told anything, and most of them run, which
takes each seconds of a core: files of the model, how ranks share it, and what the host has for them. No torch."""

import logging

from worker.config import WorkerSettings
from worker.executor.errors import ExecutorStartError
from worker.loader.config import CommonConfig
from worker.loader.convert_tokenizer import check_has_tokenizer
from worker.loader.errors import ModelConfigError, ModelError
from worker.loader.families.eagle3 import load_eagle3_config
from worker.loader.load_config import load_common_config, load_model_config
from worker.loader.shards import check_shards, shard_paths
from worker.loader.source import ModelSource, SourceFormat, is_hub_id, resolve_model
from worker.runner.fit import check_devices, check_fit, check_load_format
from worker.runner.host import num_visible_gpus
from worker.runner.memory import GIB, available_host_memory, physical_cores

RANK_BYTES = 150 << 20
"""Of a rank that has imported torch and loaded nothing, which no other process shares."""

logger = logging.getLogger(__name__)


def check_start(settings: WorkerSettings) -> None:
    """Raises ModelError or ExecutorStartError. What takes long to read is left to others, beside the ranks' imports: a
    model of the hub, which may have to be fetched, and the header of a GGUF file that one rank reads alone."""
    if not is_hub_id(settings.model):
        _check_model_here(resolve_model(settings.model), settings)
    if settings.draft_model is not None and not is_hub_id(settings.draft_model):
        _check_draft(settings.draft_model, settings)
    if settings.tensor_parallel_size > 1:
        _check_host(settings)


def load_fitting_config(source: ModelSource, settings: WorkerSettings) -> CommonConfig:
    """Of a model that can run as the settings say, as far as its configuration tells. Raises ModelError."""
    config = load_common_config(source, settings.model_impl)
    check_fit(config, settings.runner_config())
    return config


def _check_model_here(source: ModelSource, settings: WorkerSettings) -> None:
    """Raises ModelError."""
    is_safetensors = source.format is SourceFormat.SAFETENSORS
    if settings.tensor_parallel_size > 1 or (is_safetensors and settings.model_impl == "fissile"):
        load_fitting_config(source, settings)
    if is_safetensors:
        check_has_tokenizer(source.path)
    _check_files(source, settings.load_format)


def _check_files(source: ModelSource, load_format: str) -> None:
    """Of weights, unless there are to be dummy ones. Raises ModelError."""
    check_load_format(source, load_format)
    if source.format is SourceFormat.SAFETENSORS and load_format != "dummy":
        check_shards(shard_paths(source.path))


def _check_draft(name: str, settings: WorkerSettings) -> None:
    """Raises ModelConfigError, with its name."""
    load_format = "dummy" if settings.load_format == "dummy" else "auto"
    try:
        source = resolve_model(name)
        _check_files(source, load_format)
        if settings.speculative == "eagle3":
            load_eagle3_config(source)
        elif source.format is SourceFormat.SAFETENSORS:
            load_model_config(source)
    except ModelError as error:
        raise ModelConfigError(f"draft model {name}: {error}") from error


def _check_host(settings: WorkerSettings) -> None:
    """For several ranks. Raises ModelConfigError or ExecutorStartError."""
    count = settings.tensor_parallel_size - settings.remote_ranks
    num_gpus = 0 if settings.device == "cpu" else num_visible_gpus()
    if num_gpus or (num_gpus == 0 and settings.device == "cuda"):
        check_devices(num_gpus, count - 1)
    needed, free = count * RANK_BYTES, available_host_memory()
    if needed > free:
        raise ExecutorStartError(
            f"--tensor-parallel-size: {count} ranks on this host take {needed / GIB:.1f} GiB before they load "
            f"anything, and {free / GIB:.1f} GiB are free"
        )
    if num_gpus == 0 and count > (num_cores := physical_cores()):
        logger.warning(
            "--tensor-parallel-size: %d ranks share %d cores of this host: they start and compute more slowly than "
            "fewer would", count, num_cores,
        )  # fmt: skip
