"""Rotary position embedding as config.json describes it."""

from dataclasses import replace

from worker.loader.fields import Fields
from worker.loader.rope import (
    YARN_BETA_FAST,
    YARN_BETA_SLOW,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
    yarn_attention_factor,
)

TYPES = ("default", "linear", "llama3", "yarn")
PROPORTIONAL = "proportional"
"""Of all angles `partial_rotary_factor` turn, the others stand still."""
DEFAULT_THETA = 10000.0
HARMLESS = {"finetuned", "mrope_interleaved", "mrope_section"}
"""The last two say which dimensions turn with which of an image's positions; those of text are all equal."""


def hf_rope(
    fields: Fields, max_model_len: int, *, theta: float = DEFAULT_THETA, is_partial: bool = False
) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older files). `theta`: where the files
    do not say; `is_partial`: the family knows `partial_rotary_factor`. Raises ModelConfigError."""
    if "rope_scaling" in fields and "rope_parameters" in fields:
        raise fields.error("rope_scaling", "only one of rope_scaling and rope_parameters")
    rope = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    base = rope.number("rope_theta", fields.number("rope_theta", theta, above=1), above=1)
    factor = _rotary_factor(fields, rope, 1.0 if is_partial else None)
    fields.expect("rope_interleaved", False)
    original = fields.integer("original_max_position_embeddings", max_model_len)
    result = _scaled(rope, base, original)
    rope.refuse_unread(HARMLESS)
    return replace(result, rotary_factor=factor)


def hf_partial_rope(
    fields: Fields, max_model_len: int, rotary_factor: float, *, theta: float = DEFAULT_THETA
) -> RopeConfig:
    """As `hf_rope`, of families that rotate a part of each head; `rotary_factor`: where the files do not say."""
    rope = hf_rope(fields, max_model_len, theta=theta, is_partial=True)
    places = (fields, fields.section("rope_scaling"), fields.section("rope_parameters"))
    is_said = any("partial_rotary_factor" in place for place in places)
    return rope if is_said else replace(rope, rotary_factor=rotary_factor)


def hf_rope_of_type(
    fields: Fields,
    layer_type: str,
    theta: float | None,
    *,
    rotary_factor: float | None = None,
    is_proportional: bool = False,
) -> RopeConfig:
    """Of the layers of one type, where `rope_parameters` has an object for each. `rotary_factor`: where the object does
    not say, of families that rotate a part of each head. `is_proportional`: the family knows `PROPORTIONAL`. Raises
    ModelConfigError."""
    rope = fields.section("rope_parameters").section(layer_type)
    if is_proportional and rope.text("rope_type", "default", one_of=(*TYPES, PROPORTIONAL)) == PROPORTIONAL:
        return _proportional(rope, theta)
    factor = _rotary_factor(Fields({}, fields.file), rope, rotary_factor)
    result = _scaled(rope, rope.number("rope_theta", theta, above=1), fields.integer("max_position_embeddings"))
    rope.refuse_unread(HARMLESS)
    return replace(result, rotary_factor=factor)


def _proportional(rope: Fields, theta: float | None) -> RopeConfig:
    share = _share(rope, 1.0)
    result = RopeConfig(
        rope.number("rope_theta", theta, above=1), linear_factor=rope.number("factor", 1.0), turning_share=share
    )
    rope.refuse_unread({"finetuned"})
    return result


def _rotary_factor(fields: Fields, rope: Fields, default: float | None) -> float:
    """None: the family rotates whole heads."""
    if default is None:
        fields.expect("partial_rotary_factor", 1)
        rope.expect("partial_rotary_factor", 1)
        return 1.0
    place = rope if "partial_rotary_factor" in rope else fields
    fields.ignore("partial_rotary_factor")
    return _share(place, default)


def _share(fields: Fields, default: float) -> float:
    share = fields.number("partial_rotary_factor", default)
    if share > 1:
        raise fields.error("partial_rotary_factor", "a number of at most 1")
    return share


def _scaled(rope: Fields, theta: float, max_position: int) -> RopeConfig:
    kind = rope.text("rope_type", rope.text("type", "default", one_of=TYPES), one_of=TYPES)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=rope.number("factor"))
    original = rope.integer("original_max_position_embeddings", max_position)
    factor = rope.number("factor")
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor", above=low)
        return RopeConfig(theta, llama3=Llama3Scaling(factor, low, high, original))
    scaling = YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", YARN_BETA_FAST),
        beta_slow=rope.number("beta_slow", YARN_BETA_SLOW),
        truncate=rope.flag("truncate", True),
    )
    return RopeConfig(theta, yarn=scaling, attention_factor=_yarn_attention_factor(rope, factor))


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """As `transformers` works it out; mscale counts only in company."""
    mscale, all_dims = rope.number("mscale", 0.0, or_zero=True), rope.number("mscale_all_dim", 0.0, or_zero=True)
    computed = yarn_attention_factor(factor)
    if mscale and all_dims:
        computed = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dims)
    return rope.number("attention_factor", computed)
