"""Checkpoints in each quantised format."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from tests.runner import quantized_files as files
from tests.runner.conftest import save_llama
from worker.loader.fields import Fields
from worker.loader.quantized.checkpoint import QuantizedCheckpoint
from worker.loader.quantized.config import quantized_weights
from worker.loader.safetensors_file import SafetensorsCheckpoint

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}


def compressed(weights: dict[str, Any], packing: str, **others: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "actorder": None} | weights,
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        "output_activations": None,
    }
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"} | others  # fmt: skip


FLOAT8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FORMATS: dict[str, tuple[files.Maker, dict[str, Any]]] = {
    "fp8-blocks": (
        partial(files.fp8_block, block=(24, 40)),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]},
    ),
    "fp8-blocks-e8m0": (
        partial(files.fp8_block, block=(128, 128), scale_dtype=torch.float8_e8m0fnu),
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    ),
    "fp8-tensor": (
        partial(files.scaled, by_row=False, with_input=True),
        compressed(FLOAT8 | {"strategy": "tensor"}, "float-quantized"),
    ),
    "fp8-channel": (
        partial(files.scaled, by_row=True),
        compressed(FLOAT8 | {"strategy": "channel"}, "float-quantized"),
    ),
    "int8-channel": (
        partial(files.scaled, by_row=True, is_float=False),
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
    ),
    "w4a16": (partial(files.packed, size=32), compressed(INT4, "pack-quantized")),
    "w4a16-zeros": (
        partial(files.packed, size=32, symmetric=False),
        compressed(INT4 | {"symmetric": False}, "pack-quantized"),
    ),
    "w4a16-order": (
        partial(files.packed, size=32, shuffled=True),
        compressed(INT4 | {"actorder": "group"}, "pack-quantized"),
    ),
    "w8a16-channel": (
        partial(files.packed, size=None, bits=8),
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "pack-quantized"),
    ),
    "awq": (
        partial(files.awq, size=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["lm_head"]},
    ),
    "gptq": (partial(files.gptq, size=32, symmetric=False, shuffled=False, less_one=True), GPTQ | {"desc_act": False}),
    "gptq-order": (
        partial(files.gptq, size=32, symmetric=False, shuffled=True, less_one=False),
        GPTQ | {"checkpoint_format": "gptq_v2"},
    ),
    "gptq-8-bits": (partial(files.gptq, size=16, bits=8, shuffled=True, less_one=True),
                    GPTQ | {"bits": 8, "group_size": 16, "sym": True}),
}  # fmt: skip


def make(folder: Path, name: str, key: str = "quantization_config") -> LlamaForCausalLM:
    """A checkpoint in this format, and what it means."""
    model = save_llama(folder, **SHAPE)
    maker, section = FORMATS[name]
    files.quantize_files(folder, model, maker, section, key)
    return model


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor], section: dict[str, Any]) -> QuantizedCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    weights = quantized_weights(Fields({"quantization_config": section}, "config.json"))
    assert weights is not None
    return QuantizedCheckpoint(SafetensorsCheckpoint(folder), weights)
