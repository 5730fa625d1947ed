"""From a model's files to its checkpoint."""

from dataclasses import replace

from worker.loader.checkpoint import EMBEDDING, HEAD, Checkpoint, is_stored_apart
from worker.loader.config import CommonConfig, ModelConfig
from worker.loader.model_part import ModelPart
from worker.loader.quantized.checkpoint import QuantizedCheckpoint
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.loader.source import ModelSource, SourceFormat

STACKED_EXPERTS = ".experts.gate_up_proj"


def open_checkpoint(source: ModelSource, config: CommonConfig) -> Checkpoint:
    """Reads no tensor yet. Raises WeightsError or ModelConfigError."""
    if isinstance(config, ModelConfig) and source.format is SourceFormat.GGUF:
        from worker.loader.gguf.checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(source.path, config)
    stored = SafetensorsCheckpoint(source.path)
    return stored if config.quantized is None else QuantizedCheckpoint(stored, config.quantized)


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """With what the checkpoint tells and the configuration does not. Embedding and head that it stores with different
    values are not tied, as in `transformers`."""
    config = with_experts_as_stored(config, checkpoint)
    if not config.tie_word_embeddings or not is_stored_apart(ModelPart(checkpoint, config)):
        return config
    remark = f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: both are used"
    return replace(config, tie_word_embeddings=False, remarks=(*config.remarks, remark))


def with_experts_as_stored(
    config: ModelConfig, checkpoint: Checkpoint, beginnings: tuple[str, ...] = ("",)
) -> ModelConfig:
    """`beginnings`: see `ModelPart`; layers for multi-token prediction may have experts in another form than the
    model."""
    names = ModelPart(checkpoint, config, beginnings).names()
    return replace(config, has_stacked_experts=any(name.endswith(STACKED_EXPERTS) for name in names))
