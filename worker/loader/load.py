"""Fills a model with weights and hands them to the kernels."""

import logging
import time

import torch
from torch import nn

from worker.layers.embedding import OutputHead, VocabularyTable
from worker.layers.linear import LinearBase
from worker.layers.norm import RMSNorm
from worker.loader.checkpoint import Checkpoint, fill
from worker.loader.config import ModelConfig
from worker.loader.gguf_checkpoint import GGUFCheckpoint
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.loader.source import ModelSource, SourceFormat
from worker.models.base import CausalLM

logger = logging.getLogger(__name__)

DUMMY_STD = 0.02


def load_weights(model: CausalLM, source: ModelSource, config: ModelConfig) -> None:
    """From the source's files. Raises WeightsError."""
    start = time.perf_counter()
    checkpoint: Checkpoint
    if source.format is SourceFormat.GGUF:
        checkpoint = GGUFCheckpoint(source.path, config)
    else:
        checkpoint = SafetensorsCheckpoint(source.path)
    fill(model.weight_targets(), checkpoint, model.ignored_weights)
    logger.info("weights of %s read in %.1f s", source.path.name, time.perf_counter() - start)


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Random weights of the right shapes (`load_format` dummy); norms stay at one."""
    generator: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        if isinstance(module, LinearBase | VocabularyTable):
            device = module.weight.device
            if device not in generator:
                generator[device] = torch.Generator(device).manual_seed(seed)
            module.weight.normal_(0, DUMMY_STD, generator=generator[device])


def pack_weights(model: nn.Module) -> int:
    """Bring every linear layer into the kernels' layout, one at a time so that one plain copy at a time is doubled.

    Returns the bytes of all weights as the device holds them.
    """
    num_bytes = 0
    for module in model.modules():
        if isinstance(module, LinearBase | OutputHead):
            num_bytes += module.weight.numel() * module.weight.element_size()
            module.pack()
        elif isinstance(module, VocabularyTable | RMSNorm):
            num_bytes += module.weight.numel() * module.weight.element_size()
    return num_bytes
