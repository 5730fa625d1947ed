"""Fills a model with weights and hands them to the kernels."""

import torch
from torch import Tensor, nn

from worker.layers.norm import RMSNorm
from worker.layers.weighted import WeightedLayer
from worker.loader.checkpoint import Checkpoint, fill
from worker.loader.config import ModelConfig
from worker.loader.model_part import ModelPart
from worker.loader.quantized.checkpoint import QuantizedCheckpoint
from worker.loader.staged import StagedCheckpoint
from worker.models.base import CausalLM

DUMMY_STD = 0.02


def load_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    beginnings: tuple[str, ...] = ("",),
) -> None:
    """`device` is the model's. `beginnings`: the names of its tensors have one of these, those of another model do not.
    Raises WeightsError."""
    if device.type != "cpu":
        checkpoint = _staged(checkpoint, device)
    part = ModelPart(checkpoint, config, beginnings)
    if "" in beginnings:
        part.log_unused()
    fill(model.weight_targets(), part, tied=config.tie_word_embeddings)
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what tensors passed through, in the streams of threads that are gone


def _staged(checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
    if isinstance(checkpoint, QuantizedCheckpoint):
        # Its parts go to the device as they are, and are put together there.
        return checkpoint.through(lambda stored: StagedCheckpoint(stored, device))
    return StagedCheckpoint(checkpoint, device)


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Random weights of the right shapes (`load_format` dummy); norms stay at one, biases at zero."""
    generators: dict[torch.device, torch.Generator] = {}

    def noise(weight: Tensor) -> None:
        if weight.device not in generators:
            generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
        weight.normal_(0, DUMMY_STD, generator=generators[weight.device])

    for module in model.modules():
        if isinstance(module, WeightedLayer) and not isinstance(module, RMSNorm):
            module.fill(noise)


def pack_weights(model: nn.Module) -> int:
    """Bring every layer's weights into the kernels' layout, one at a time so that one plain copy at a time is doubled.

    Returns the bytes of all weights as the device holds them.
    """
    num_bytes = 0
    for module in model.modules():
        if isinstance(module, WeightedLayer):
            num_bytes += module.pack()
    return num_bytes
