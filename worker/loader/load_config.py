"""From a model's files to its configuration. No torch, unless `transformers` reads them."""

from worker.loader.config import CommonConfig, ModelConfig
from worker.loader.source import ModelSource, SourceFormat


def load_common_config(source: ModelSource, model_impl: str) -> CommonConfig:
    """As whoever computes the model reads them. Raises ModelConfigError, naming file, field and value, or WeightsError
    (damaged GGUF)."""
    if model_impl == "transformers":
        from worker.loader.generic_config import load_generic_config  # it takes seconds to import

        return load_generic_config(source)
    return load_model_config(source)


def load_model_config(source: ModelSource) -> ModelConfig:
    """Raises as `load_common_config`."""
    # Of the two readers, with all their families, a start needs one; each takes a twentieth of a second to import.
    if source.format is SourceFormat.GGUF:
        from worker.loader.gguf.config import load_gguf_config

        return load_gguf_config(source.path)
    from worker.loader.hf_config import load_hf_config

    return load_hf_config(source.path)
