"""From a model's files to its checkpoint."""

from dataclasses import replace

from worker.loader.checkpoint import EMBEDDING, HEAD, Checkpoint, is_stored_apart
from worker.loader.config import CommonConfig, ModelConfig
from worker.loader.model_part import ModelPart
from worker.loader.quantized.checkpoint import QuantizedCheckpoint
from worker.loader.safetensors_file import SafetensorsCheckpoint
from worker.loader.source import ModelSource, SourceFormat


def open_checkpoint(source: ModelSource, config: CommonConfig) -> Checkpoint:
    """Reads no tensor yet. Raises WeightsError or ModelConfigError."""
    if isinstance(config, ModelConfig) and source.format is SourceFormat.GGUF:
        from worker.loader.gguf_checkpoint import GGUFCheckpoint  # its library takes a tenth of a second to import

        return GGUFCheckpoint(source.path, config)
    stored = SafetensorsCheckpoint(source.path)
    return stored if config.quantized is None else QuantizedCheckpoint(stored, config.quantized)


def as_stored(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Embedding and head that the checkpoint stores with different values are not tied, as in `transformers`."""
    if not config.tie_word_embeddings or not is_stored_apart(ModelPart(checkpoint, config)):
        return config
    remark = f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: both are used"
    return replace(config, tie_word_embeddings=False, remarks=(*config.remarks, remark))
