"""What a config.json says of quantised weights: read, or refused by the field's name."""

from typing import Any

import pytest

from worker.loader.errors import ModelConfigError
from worker.loader.fields import Fields
from worker.loader.quantized.config import quantized_weights
from worker.loader.quantized.schemes import Awq, Gptq, PackedInt, QuantizedWeights, Scaled

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def read(**section: Any) -> QuantizedWeights:
    weights = quantized_weights(Fields({"quantization_config": section}, "config.json"))
    assert weights is not None
    return weights


def compressed(*groups: dict[str, Any], **others: Any) -> QuantizedWeights:
    """Groups have targets, weights and perhaps a format."""
    return read(
        quant_method="compressed-tensors", config_groups={str(i): group for i, group in enumerate(groups)}, **others
    )


def test_a_plain_checkpoint() -> None:
    assert quantized_weights(Fields({"quantization_config": None}, "config.json")) is None


def test_groups_of_modules_have_schemes_of_their_own() -> None:
    """A group for some modules goes before one for all."""
    weights = compressed(
        {"targets": ["Linear"], "weights": GROUP, "format": "pack-quantized"},
        {"targets": ["re:.*down_proj", "model.layers.0"], "weights": FP8, "format": "float-quantized"},
        format="mixed-precision",
        ignore=["lm_head", "re:.*router"],
    )
    assert weights.scheme_of("model.layers.1.mlp.up_proj") == PackedInt(4, 64, is_symmetric=False)
    assert weights.scheme_of("model.layers.1.mlp.down_proj") == Scaled(is_float=True)
    assert weights.scheme_of("model.layers.0.mlp.up_proj") == Scaled(is_float=True)
    assert [weights.is_ignored(name) for name in ("lm_head", "a.router", "model")] == [True, True, False]
    assert weights.is_in_blocks


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Scaled(is_float=True, block=(128, 64))),
        ({"quant_method": "fp8"}, Scaled(is_float=True)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Scaled(is_float=True)),
        ({"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}, Awq(None)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, Gptq(8, 64, is_first_version=True)),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, Gptq(4, 128, is_first_version=False)),
    ],
)
def test_methods(section: dict[str, Any], scheme: object) -> None:
    assert read(**section).scheme_of("model.layers.0.mlp.up_proj") == scheme


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_left_alone(key: str) -> None:
    weights = read(quant_method="fp8", **{key: ["lm_head", "model.layers.0"]})
    assert [weights.is_ignored(f"{name}.mlp") for name in ("model.layers.0", "model.layers.01")] == [True, False]


def test_scales_of_a_cache() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    group = {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"}
    assert compressed(group, kv_cache_scheme=scheme).has_cache_scales
    assert not compressed(group, kv_cache_scheme=None).has_cache_scales
    with pytest.raises(ModelConfigError, match=r"kv_cache_scheme\.strategy is 'attn_head'; nothing but 'tensor'"):
        compressed(group, kv_cache_scheme=scheme | {"strategy": "attn_head"})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method is 'bitsandbytes'; one of awq, compressed-tensors, .* needed",
        ),
        ({"bits": 4}, r"lacks quantization_config\.quant_method"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; nothing but 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; a list of two sizes"),
        ({"quant_method": "fp8", "rotation": True}, "rotation is True; fields that are not known here"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8; nothing but 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; 4 or 8 is needed"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; -1 or a number above 0"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {}}}, "dynamic is"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, r"'re:\(' is no regular expression"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read(**section)


@pytest.mark.parametrize(
    ("weights", "packing", "message"),
    [
        (GROUP, "marlin-24", "format is 'marlin-24'; one of pack-quantized"),
        (GROUP | {"num_bits": 3}, "pack-quantized", r"weights\.num_bits is 3; 4 or 8"),
        (GROUP | {"type": "float"}, "pack-quantized", r"weights\.type is 'float'; int is needed"),
        (GROUP | {"strategy": "tensor_group"}, "pack-quantized", r"weights\.strategy is 'tensor_group'; one of"),
        (FP8 | {"symmetric": False}, "float-quantized", r"weights\.symmetric is False"),
        (FP8 | {"dynamic": True}, "float-quantized", r"weights\.dynamic is True"),
    ],
)
def test_compressed_tensors_that_are_not_supported(weights: dict[str, Any], packing: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        compressed({"targets": ["Linear"], "weights": weights}, format=packing)


def test_transforms_of_activations_change_the_computation() -> None:
    with pytest.raises(ModelConfigError, match="transform_config is"):
        compressed({"targets": ["Linear"], "weights": GROUP}, format="pack-quantized", transform_config={"a": 1})
