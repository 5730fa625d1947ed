"""From a directory's config.json and generation_config.json to a `ModelConfig`.

A family reads its fields; every other field must be known to be harmless. A field that changes what the model computes
and is not implemented is an error, never ignored.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from worker.loader.config import ModelConfig
from worker.loader.ending_tokens import ending_tokens
from worker.loader.errors import ModelConfigError, UnknownArchitectureError
from worker.loader.families.registry import FAMILIES
from worker.loader.fields import Fields, read_json
from worker.loader.quantized.config import SECTIONS, quantized_weights

CONFIG, GENERATION = "config.json", "generation_config.json"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Where quantisers put what config.json should say."""

_BOOKKEEPING = {
    "auto_map", "finetuning_task", "id2label", "is_llama_config", "label2id", "license", "num_labels", "prefix",
    "problem_type", "task_specific_params", "tokenizer_class", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
_OF_TRANSFORMERS = {
    "attn_implementation", "chunk_size_feed_forward", "cross_attention_hidden_size", "gradient_checkpointing",
    "is_decoder", "output_attentions", "output_hidden_states", "output_scores", "return_dict",
    "return_dict_in_generate", "tf_legacy_loss", "torchscript", "use_bfloat16", "use_cache",
}  # fmt: skip
_OF_TRAINING = {
    "attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "initializer_range", "neftune_noise_alpha",
    "resid_pdrop",
}  # fmt: skip
_TOKENS = {"bos_token_id", "decoder_start_token_id", "pad_token_id", "sep_token_id", "unk_token_id"}
_OF_GENERATION = {
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
HARMLESS = frozenset(_BOOKKEEPING | _OF_TRANSFORMERS | _OF_TRAINING | _TOKENS | _OF_GENERATION)
"""Fields of any config.json that change nothing in what a decoder computes."""
_NOT_FOLLOWED = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
                 "bad_words_ids", "sequence_bias")  # fmt: skip
"""Of generation_config.json: recommendations that `transformers` would follow."""


def load_hf_config(directory: Path) -> ModelConfig:
    """Raises ModelConfigError."""
    config = config_from_hf(read_json(directory / CONFIG), read_json(directory / GENERATION, optional=True))
    for name in QUANTIZATION_FILES:
        if config.quantized is None and (directory / name).is_file():
            raise ModelConfigError(f"{name} says that weights are quantised; {CONFIG} has to say it: {SECTIONS[0]}")
    return config


def config_from_hf(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """From the contents of both files; `generation` is {} when there is none. Raises ModelConfigError."""
    # Names with an underscore in front are a program's notes to itself.
    fields = Fields({key: value for key, value in config.items() if not key.startswith("_")}, CONFIG)
    advice = Fields(generation, GENERATION)
    parse = _family(fields)
    fields.expect("quantization")  # the form of another program's files
    quantized = quantized_weights(fields)
    fields.expect("is_encoder_decoder", False)
    fields.expect("add_cross_attention", False)
    fields.expect("tie_encoder_decoder", False)
    fields.expect("pruned_heads", {})
    model = parse(fields)
    eos_token_ids, remarks = ending_tokens([(advice, "eos_token_id"), (fields, "eos_token_id")], model.vocab_size)
    fields.refuse_unread(HARMLESS)
    remarks += tuple(f"{GENERATION}: {key} is not followed" for key in _NOT_FOLLOWED if key in advice)
    return replace(model, quantized=quantized, eos_token_ids=eos_token_ids, remarks=remarks)


def _family(fields: Fields) -> Callable[[Fields], ModelConfig]:
    names = fields.texts("architectures", [])
    if not names:
        raise UnknownArchitectureError(f"{CONFIG} names no architecture (`architectures`)")
    if names[0] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownArchitectureError(f"architecture {names[0]!r} is not supported; known: {known}")
    return FAMILIES[names[0]]
