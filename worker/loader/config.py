"""What a model is, whatever its files look like. No torch."""

from dataclasses import dataclass
from pathlib import Path

from worker.loader.experts import ExpertsConfig
from worker.loader.quantized.schemes import QuantizedWeights
from worker.loader.rope import RopeConfig

MAX_LAYERS = 4096
MAX_SIZE = 2**20
"""Of a hidden state, in heads or features."""
MAX_VOCABULARY = 2**24
MAX_CONTEXT = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """What everyone reads of a model, whoever computes it."""

    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str = "float32"
    """What the checkpoint is stored in, as far as it says; quantised ones count as float32."""
    quantized: QuantizedWeights | None = None
    """How weights are stored that are not numbers of a type of their own; None: none are, or the file is a GGUF one."""
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a sequence. All are in the vocabulary."""
    remarks: tuple[str, ...] = ()
    """What the files say and this engine does not follow, each with file, field and value; for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericConfig(CommonConfig):
    """Of a model that `transformers` computes, from its own reading of the same files."""

    path: Path
    """The directory."""
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(CommonConfig):
    """Of a model that is made of layers of ours."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    experts: ExpertsConfig | None = None
    """In some layers, or in all of them."""
    attention_bias: bool = False
    """Of the four projections."""
    qkv_bias: bool = False
    """Of all but the output's."""
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """Of each layer: a token sees the last so many, itself included; None: all. Empty: no layer has one."""
    weight_prefixes: tuple[tuple[str, str], ...] = ()
    """Beginnings of names in the checkpoint, and what stands in the model for each; the first that fits counts."""
    skipped_weights: tuple[str, ...] = ()
    """Beginnings of names, as in the model, of tensors that the checkpoint may have and the model does not use."""
    has_stacked_experts: bool = False
    """The checkpoint has all experts' gates and ups in one tensor, in place of two for each of them."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
