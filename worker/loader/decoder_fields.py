"""One object of a config.json that describes a decoder: what holds for every family's."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from worker.loader.config import ModelConfig
from worker.loader.ending_tokens import ending_tokens
from worker.loader.fields import Fields
from worker.loader.quantized.config import quantized_weights

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
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
"""They change nothing in what a decoder computes."""


def read_decoder(fields: Fields, parse: Callable[[Fields], ConfigT]) -> ConfigT:
    """`parse` reads the family's own fields; no field may be left that could change the computation, except that names
    with an underscore in front are a program's notes to itself. Raises ModelConfigError."""
    fields.expect("quantization")  # the form of another program's files
    quantized = quantized_weights(fields)
    fields.expect("is_encoder_decoder", False)
    fields.expect("add_cross_attention", False)
    fields.expect("tie_encoder_decoder", False)
    fields.expect("pruned_heads", {})
    model = parse(fields)
    eos_token_ids, remarks = ending_tokens([(fields, "eos_token_id")], model.vocab_size)
    fields.refuse_unread(HARMLESS | {name for name in fields.names() if name.startswith("_")})
    return replace(
        model,
        quantized=quantized or model.quantized,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids + model.eos_token_ids)),
        remarks=remarks + model.remarks,
    )
