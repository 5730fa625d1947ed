"""What a config.json says of quantised weights. No torch.

Activations are never rounded, whatever a file says of theirs: to round them is how some machines multiply faster.
"""

import re
from collections.abc import Callable

from worker.loader.errors import ModelConfigError
from worker.loader.fields import Fields
from worker.loader.quantized.schemes import (
    ANY_LINEAR,
    Awq,
    Gptq,
    MxFp4Experts,
    PackedInt,
    QuantizedWeights,
    Rule,
    Scaled,
    Scheme,
)

SECTIONS = ("quantization_config", "compression_config")
WHOLE_BITS = (4, 8)
MAX_GROUP = 2**20
_ACTIVATIONS = ("activation_scheme", "activation_scale_ub", "input_activations")
_OF_THE_QUANTISER = {
    "act_group_aware", "actorder", "autoround_version", "batch_size", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "exllama_config", "global_compression_ratio", "iters", "low_gpu_mem_usage", "lr",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "nsamples", "observer", "observer_kwargs", "offload_to_disk",
    "packed_modules_mapping", "pad_token_id", "quantization_status", "scale_dtype", "seqlen", "static_groups",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "version", "zp_dtype",
}  # fmt: skip
"""How the weights came to be what they are, or how somebody may multiply with them."""


def quantized_weights(config: Fields) -> QuantizedWeights | None:
    """From the fields of a config.json; None where its weights are plain. Raises ModelConfigError."""
    sections = [key for key in SECTIONS if key in config]
    if not sections:
        return None
    if len(sections) > 1:
        raise config.error(sections[1], f"only one of {' and '.join(SECTIONS)}")
    fields = config.section(sections[0])
    default = "compressed-tensors" if sections[0] == "compression_config" else None
    weights = _METHODS[fields.text("quant_method", default, one_of=_METHODS)](fields)
    for pattern in (*weights.ignored, *(target for rule in weights.rules for target in rule.targets)):
        _check_pattern(fields, pattern)
    fields.refuse_unread(_OF_THE_QUANTISER)
    return weights


def _check_pattern(fields: Fields, pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ModelConfigError(f"{fields.file}: {pattern!r} is no regular expression: {error}") from error


def _all_linear(scheme: Scheme, fields: Fields, *ignored_fields: str) -> QuantizedWeights:
    """Of a method that has one scheme, and a list of what it leaves as it is."""
    name = next((name for name in ignored_fields if name in fields), ignored_fields[0])
    fields.ignore(*ignored_fields)
    ignored = tuple(fields.texts(name, []))
    return QuantizedWeights((Rule((ANY_LINEAR,), scheme),), ignored, name, has_cache_scales=_cache_scales(fields))


def _cache_scales(fields: Fields) -> bool:
    """Whether there are scales for a cache of float8_e4m3, one of a layer's keys and one of its values."""
    if "kv_cache_scheme" not in fields:
        return False
    scheme = fields.section("kv_cache_scheme")
    scheme.expect("num_bits", 8)
    scheme.expect("type", "float")
    scheme.expect("strategy", "tensor")
    scheme.expect("symmetric", True)
    scheme.expect("dynamic", False)
    scheme.refuse_unread(_OF_THE_QUANTISER)
    return True


def _fp8(fields: Fields) -> QuantizedWeights:
    fields.ignore(*_ACTIVATIONS)
    fields.expect("fmt", "e4m3")
    fields.expect("scale_fmt", "float", "ue8m0")
    fields.expect("expert_dtype", "fp8")
    fields.expect("dequantize", False, True)
    fields.expect("modules_to_convert", [])
    block = _block(fields, "weight_block_size")
    return _all_linear(Scaled(is_float=True, block=block), fields, "modules_to_not_convert", "ignored_layers")


def _awq(fields: Fields) -> QuantizedWeights:
    fields.expect("bits", 4)
    fields.expect("w_bit", 4)
    fields.expect("zero_point", True)
    fields.expect("version", "gemm", "GEMM")
    fields.expect("format", "gemm")
    fields.ignore("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    return _all_linear(Awq(_group_size(fields, 128)), fields, "modules_to_not_convert")


def _gptq(fields: Fields) -> QuantizedWeights:
    bits = fields.integer("bits")
    if bits not in WHOLE_BITS:
        raise fields.error("bits", "4 or 8")
    fields.flag("desc_act", False)  # the order is in each tensor's g_idx
    fields.flag("sym", True)  # zero points are stored whether it is or not
    fields.flag("lm_head", False)  # a head in numbers of its own is found by its tensors
    fields.expect("dynamic", {})
    fields.expect("pack_dtype", "int32")
    fields.expect("is_marlin_format", False)
    fields.ignore("backend", "block_name_to_quantize", "modules_in_block_to_quantize")
    stored = fields.text("checkpoint_format", fields.text("format", "gptq"), one_of=("gptq", "gptq_v2"))
    return _all_linear(Gptq(bits, _group_size(fields, 128), stored == "gptq"), fields, "modules_to_not_convert")


def _mxfp4(fields: Fields) -> QuantizedWeights:
    fields.expect("dequantize", False, True)
    return _all_linear(MxFp4Experts(), fields, "modules_to_not_convert")


def _compressed(fields: Fields) -> QuantizedWeights:
    groups = fields.section("config_groups")
    fields.expect("transform_config", {})
    sparsity = fields.section("sparsity_config")
    sparsity.expect("format", "dense")
    packing = fields.text("format", "dense")
    rules = [_group(groups.section(name), packing, fields) for name in groups.names()]
    if not rules:
        raise fields.error("config_groups", "at least one group")
    # Rules for some modules come before those for all.
    rules.sort(key=lambda rule: ANY_LINEAR in rule.targets)
    ignored = tuple(fields.texts("ignore", []))
    return QuantizedWeights(tuple(rules), ignored, "ignore", has_cache_scales=_cache_scales(fields))


def _group(group: Fields, packing: str, fields: Fields) -> Rule:
    group.ignore(*_ACTIVATIONS)
    group.expect("output_activations")
    weights = group.section("weights")
    bits, is_float = weights.integer("num_bits"), weights.text("type", "int", one_of=("int", "float")) == "float"
    strategy = weights.text("strategy", one_of=("tensor", "channel", "group", "block"))
    is_symmetric = weights.flag("symmetric", True)
    weights.expect("dynamic", False)
    packing = group.text("format", packing)
    if packing == "pack-quantized":
        scheme: Scheme = _packed(weights, bits, is_float, is_symmetric, strategy)
    elif packing in ("float-quantized", "int-quantized", "naive-quantized"):
        weights.expect("num_bits", 8)
        weights.expect("symmetric", True)
        if strategy == "group":
            raise weights.error("strategy", "one of tensor, channel, block")
        block = _block(weights, "block_structure") if strategy == "block" else None
        weights.ignore("group_size")
        scheme = Scaled(is_float, block)
    else:
        raise fields.error("format", "one of pack-quantized, float-quantized, int-quantized, naive-quantized")
    weights.refuse_unread(_OF_THE_QUANTISER)
    rule = Rule(tuple(group.texts("targets")), scheme)
    group.refuse_unread(())
    return rule


def _packed(weights: Fields, bits: int, is_float: bool, is_symmetric: bool, strategy: str) -> PackedInt:
    if bits not in WHOLE_BITS:
        raise weights.error("num_bits", "4 or 8")
    if is_float:
        raise weights.error("type", "int")
    if strategy not in ("channel", "group"):
        raise weights.error("strategy", "channel or group")
    weights.expect("block_structure")
    return PackedInt(bits, _group_size(weights, None) if strategy == "group" else None, is_symmetric)


def _group_size(fields: Fields, default: int | None) -> int | None:
    """−1 is the whole row."""
    key = "q_group_size" if "q_group_size" in fields else "group_size"
    size = fields.integer(key, default, least=-1, most=MAX_GROUP)
    if size == 0:
        raise fields.error(key, "-1 or a number above 0")
    return None if size == -1 else size


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    if key not in fields:
        return None
    sizes = fields.integers(key)
    if len(sizes) != 2 or not all(0 < size <= MAX_GROUP for size in sizes):
        raise fields.error(key, "a list of two sizes")
    return sizes[0], sizes[1]


_METHODS: dict[str, Callable[[Fields], QuantizedWeights]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
