"""What the config.json of an EAGLE-3 draft says (arXiv 2503.01840): one layer that goes on from states of another
model, under the names that checkpoints of `LlamaForCausalLMEagle3` have."""

from dataclasses import dataclass, replace

from worker.loader.config import MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY, ModelConfig
from worker.loader.decoder_fields import read_decoder
from worker.loader.errors import ModelConfigError
from worker.loader.families.dense import dense_config, expect_full_attention, extended
from worker.loader.fields import Fields, read_json
from worker.loader.source import ModelSource, SourceFormat

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(ModelConfig):
    draft_vocab_size: int
    """Tokens that it may propose."""
    target_hidden_size: int
    """Of the model that it drafts for."""
    layer_ids: tuple[int, ...] = ()
    """As the file has them; empty: it does not say."""
    has_normed_residual: bool = False
    """The residual is the normed state, in place of the state."""
    has_embedding: bool = False
    has_head: bool = False
    """The checkpoint has its own, in place of the other model's."""

    def places(self, num_layers: int) -> tuple[int, ...]:
        """Behind how many layers of that model, which has `num_layers`, its states stand. Raises ModelConfigError.

        Files count in two ways: by the layer whose output a state is, which begins with 1 as nobody takes that of layer
        0, or by the layers before it.
        """
        found = self.layer_ids or (2, num_layers // 2, num_layers - 3)
        if self.layer_ids and found[0] == 1:
            found = tuple(number + 1 for number in found)
        if not all(0 <= place <= num_layers for place in found):
            said = f"{LAYER_IDS} is {list(self.layer_ids)}" if self.layer_ids else f"it names no {LAYER_IDS}"
            raise ModelConfigError(
                f"{said}: states behind {', '.join(map(str, found))} layers, and the model it drafts for has "
                f"{num_layers}"
            )
        return found


def load_eagle3_config(source: ModelSource) -> Eagle3Config:
    """Raises ModelConfigError."""
    if source.format is not SourceFormat.SAFETENSORS:
        raise ModelConfigError(f"it is a {source.format.value} file; EAGLE-3 drafts are read from safetensors")
    fields = Fields(read_json(source.path / "config.json"), "config.json")
    names = fields.texts("architectures", [])
    if names != [ARCHITECTURE]:
        raise ModelConfigError(f"its architecture is {', '.join(names) or 'absent'}; {ARCHITECTURE} is needed")
    return read_decoder(fields, eagle3_config)


def eagle3_config(fields: Fields) -> Eagle3Config:
    """Raises ModelConfigError."""
    fields.integer("pretraining_tp", 1)
    fields.expect("num_hidden_layers", 1)
    fields.expect("tie_word_embeddings", False)
    fields.expect("bias", False)
    fields.expect("norm_before_fc", False)
    fields.expect("additional_fc", False)
    # Whose head it is, the tensors tell, and which model it is for, the one that is served.
    fields.ignore("reuse_target_lm_head", "target_model_type")
    expect_full_attention(fields)
    base = replace(
        dense_config(fields, ARCHITECTURE, "llama"),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        # Files name the parts as parts of a model, or by themselves, and the layer by its number, too.
        weight_prefixes=(("model.layers.0.", "midlayer."), ("layers.0.", "midlayer."), ("model.", "")),
        skipped_weights=("d2t", "t2d"),
    )
    section = fields.section("eagle_config")
    section.expect("use_aux_hidden_state", True)
    section.expect("use_input_layernorm_in_first_layer", True)
    section.expect("use_last_layernorm", True)
    section.expect("use_mtp_layernorm", False)
    section.expect("next_layer_regular", True)
    layer_ids = _layer_ids(section) or _layer_ids(fields)
    section.refuse_unread(())
    return extended(
        base,
        Eagle3Config,
        draft_vocab_size=fields.integer("draft_vocab_size", base.vocab_size, most=MAX_VOCABULARY),
        target_hidden_size=fields.integer("target_hidden_size", base.hidden_size, most=MAX_SIZE),
        layer_ids=layer_ids,
        has_normed_residual=fields.flag("norm_before_residual", False),
    )


def _layer_ids(fields: Fields) -> tuple[int, ...]:
    found = tuple(fields.integers(LAYER_IDS, []))
    if not all(0 <= number <= MAX_LAYERS for number in found):
        raise fields.error(LAYER_IDS, f"a list of numbers from 0 to {MAX_LAYERS}")
    return found
