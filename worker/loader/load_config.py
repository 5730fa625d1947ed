"""From a model's files to its `ModelConfig`. No torch."""

from worker.loader.config import ModelConfig
from worker.loader.hf_config import load_hf_config
from worker.loader.source import ModelSource, SourceFormat


def load_model_config(source: ModelSource) -> ModelConfig:
    """Raises ModelConfigError, naming file, field and value, or WeightsError (damaged GGUF)."""
    if source.format is SourceFormat.GGUF:
        from worker.loader.gguf_config import load_gguf_config

        return load_gguf_config(source.path)
    return load_hf_config(source.path)
