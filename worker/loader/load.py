"""Fills a model with weights and hands them to the kernels."""

import logging
import time
from dataclasses import replace

import torch
from torch import nn

from worker.layers.norm import RMSNorm
from worker.layers.weighted import WeightedLayer
from worker.loader.checkpoint import EMBEDDING, HEAD, Checkpoint, fill, is_stored_apart
from worker.loader.config import ModelConfig
from worker.loader.gguf_checkpoint import GGUFCheckpoint
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.loader.source import ModelSource, SourceFormat
from worker.models.base import CausalLM

logger = logging.getLogger(__name__)

DUMMY_STD = 0.02


def open_checkpoint(source: ModelSource, config: ModelConfig) -> Checkpoint:
    """Reads no tensor yet. Raises WeightsError or ModelConfigError."""
    if source.format is SourceFormat.GGUF:
        return GGUFCheckpoint(source.path, config)
    return SafetensorsCheckpoint(source.path)


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Embedding and head that the checkpoint stores with different values are not tied, as in `transformers`."""
    if not config.tie_word_embeddings or not is_stored_apart(checkpoint):
        return config
    remark = f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: both are used"
    return replace(config, tie_word_embeddings=False, remarks=(*config.remarks, remark))


def load_weights(model: CausalLM, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises WeightsError."""
    start = time.perf_counter()
    fill(model.weight_targets(), checkpoint, tied=config.tie_word_embeddings)
    logger.info("weights read in %.1f s", time.perf_counter() - start)


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Random weights of the right shapes (`load_format` dummy); norms stay at one, biases at zero."""
    generators: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        if isinstance(module, WeightedLayer) and not isinstance(module, RMSNorm):
            for weight in module.weights():
                if weight.dim() > 1:
                    if weight.device not in generators:
                        generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
                    weight.normal_(0, DUMMY_STD, generator=generators[weight.device])


def pack_weights(model: nn.Module) -> int:
    """Bring every layer's weights into the kernels' layout, one at a time so that one plain copy at a time is doubled.

    Returns the bytes of all weights as the device holds them.
    """
    num_bytes = 0
    for module in model.modules():
        if isinstance(module, WeightedLayer):
            num_bytes += sum(weight.numel() * weight.element_size() for weight in module.weights())
            module.pack()
    return num_bytes
