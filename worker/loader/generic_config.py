"""The configuration of a model that `transformers` computes, as `transformers` reads it. It imports torch."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from worker.loader.config import MAX_CONTEXT, MAX_LAYERS, MAX_VOCABULARY, GenericConfig
from worker.loader.ending_tokens import ending_tokens
from worker.loader.errors import ModelConfigError, UnknownArchitectureError
from worker.loader.families.dense import DTYPES
from worker.loader.fields import Fields, read_json
from worker.loader.hf_config import CONFIG, GENERATION, with_advice, with_tokenizers_ending
from worker.loader.quantized.config import SECTIONS
from worker.loader.source import ModelSource, SourceFormat

MAX_SUMMARY = 300
"""Characters of the library's own words."""
BY_BATCH = "longrope"
"""The rotary type whose angles are others once any text of a batch is longer than the original context."""


_HOW = (
    "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation",
    "fusion_config", "distributed_config",
)  # fmt: skip
_BUILT_IN = ("eager", "sdpa", "flash_attention_2", "grouped_mm", "batched_mm")
"""Of fields that say how, not what is computed. Other values may name code of the hub, which `transformers` would load
and run."""


def load_generic_config(source: ModelSource) -> GenericConfig:
    """Runs no code of the model's. Raises ModelConfigError naming the field."""
    if source.format is not SourceFormat.SAFETENSORS:
        raise ModelConfigError(
            f"model_impl transformers reads config.json and *.safetensors; {source.path} is a GGUF file"
        )
    raw = read_json(source.path / CONFIG)
    stated = Fields(raw, CONFIG)
    architecture = _architecture(stated)
    stated.expect("is_encoder_decoder", False)
    for section in SECTIONS:
        stated.expect(section)
    for how in _HOW:
        stated.expect(how, *_BUILT_IN)
    fields = Fields(raw | _as_read(source.path), CONFIG)
    vocab_size = fields.integer("vocab_size", most=MAX_VOCABULARY)
    context, remarks = _context(fields)
    endings, more = ending_tokens([(stated, "eos_token_id")], vocab_size)
    config = GenericConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        max_model_len=context,
        dtype=stated.text("dtype", stated.text("torch_dtype", "float32", one_of=DTYPES), one_of=DTYPES),
        eos_token_ids=endings,
        remarks=remarks + more,
        path=source.path,
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
    )
    config = with_advice(config, Fields(read_json(source.path / GENERATION, optional=True), GENERATION))
    return with_tokenizers_ending(config, source.path)


def _architecture(stated: Fields) -> str:
    """Raises UnknownArchitectureError for what is no decoder of the installed `transformers`."""
    model_type, names = stated.text("model_type"), stated.texts("architectures", [])
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if known is None or names != [known] or not known.endswith(("ForCausalLM", "LMHeadModel")):
        raise UnknownArchitectureError(
            f"{CONFIG}: architectures is {names}, model_type {model_type!r}; transformers {transformers.__version__} "
            f"has {f'{known} for it' if known else 'no decoder of that type'}, and code that comes with a model is "
            "never run"
        )
    return known


def _as_read(path: Path) -> dict[str, Any]:
    """All fields, defaults included, under the names that families share. Raises ModelConfigError."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a reader of many formats raises is about this file
        raise ModelConfigError(f"{CONFIG}: transformers cannot read it: {summary_of(error)}") from error
    values = config.to_dict()
    return values | {name: values[own] for name, own in config.attribute_map.items() if own in values}


def _context(fields: Fields) -> tuple[int, tuple[str, ...]]:
    """(the longest context that can be served, remarks)."""
    longest, key = fields.integer("max_position_embeddings", most=MAX_CONTEXT), "original_max_position_embeddings"
    whole = fields.section("rope_parameters")
    of_types = [whole.section(name) for name in set(fields.texts("layer_types", [])) if name in whole]
    bounds = [
        rope.integer(key, fields.integer(key, longest))
        for rope in (whole, *of_types)
        if rope.text("rope_type", "default") == BY_BATCH
    ]
    if min(bounds, default=longest) >= longest:
        return longest, ()
    return min(bounds), (
        f"{CONFIG}: rope_parameters.rope_type is {BY_BATCH!r}: the longest text of a batch would change the angles of "
        f"all others, so contexts end at {key}, {min(bounds)}",
    )


def summary_of(error: Exception) -> str:
    """In one line."""
    return " ".join(str(error).split())[:MAX_SUMMARY] or type(error).__name__
