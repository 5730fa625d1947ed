"""A cache of fewer bits than activations have: what it loses and costs, in whole models, and scales of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.runner.conftest import make_driver, random_prompt, save_llama
from tests.runner.driver import Driver, cache_of
from tests.runner.executors import driver_of, running, tiny_config
from tests.runner.logits import capture_logits
from worker.kernels.gqa import GqaSpec
from worker.kernels.native.build import this_cpu
from worker.kernels.native.library import obstacle
from worker.kernels.select import Kernels
from worker.layers.setup import LayerSetup
from worker.loader.errors import ModelConfigError, WeightsError
from worker.parallel.group import ALONE, Group
from worker.runner import load
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

SCALES = (0.0625, 0.25)


def error_of(driver: Driver, model: LlamaForCausalLM) -> float:
    """Of the logits after a prompt and some decode steps, relative to the largest."""
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(20, 0))
    driver.prefill(seq)
    driver.decode(seq, steps=3)
    with torch.inference_mode():
        expected = model(torch.tensor([seq.tokens[:-1]])).logits[0, -1]
    return float((seen[-1][0] - expected).abs().max() / expected.abs().max())


def with_scales(folder: Path, scales: tuple[float, ...]) -> LlamaForCausalLM:
    """A checkpoint of floats but for the cache; a scale of keys and one of values for each layer."""
    model = save_llama(folder, initializer_range=0.1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for i in range(model.config.num_hidden_layers):
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=False):
            tensors[f"model.layers.{i}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, path)
    section = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": [],
        "config_groups": {"0": {"targets": ["re:none"], "weights": {"num_bits": 8, "type": "float",
                                                                    "strategy": "channel"}}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
                            "symmetric": True},
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return model


def test_logits_stay_near_those_of_a_float_cache(tmp_path: Path) -> None:
    model = save_llama(tmp_path, initializer_range=0.1)
    assert error_of(make_driver(tmp_path), model) < 1e-5
    assert 1e-5 < error_of(make_driver(tmp_path, kv_cache_dtype="fp8"), model) < 0.05


@pytest.fixture
def wide(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    """Of heads that native kernels take."""
    return tmp_path, save_llama(
        tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.1
    )


DEFAULT = torch.int8 if "avx512_vnni" in this_cpu() else torch.bfloat16
NEEDS_NATIVE = pytest.mark.skipif(obstacle() is not None, reason="needs AVX2 and a C++ compiler")
EIGHT_BITS = ["fp8", pytest.param("int8", marks=NEEDS_NATIVE)]


@NEEDS_NATIVE
def test_logits_stay_near_with_int8(wide: tuple[Path, LlamaForCausalLM]) -> None:
    assert 1e-5 < error_of(make_driver(wide[0], kv_cache_dtype="int8"), wide[1]) < 0.02


@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_entries_are_swapped_copied_and_cleared(wide: tuple[Path, LlamaForCausalLM], cache: str) -> None:
    driver = make_driver(wide[0], kv_cache_dtype=cache, swap_space_gib=0.001)
    seq, other = driver.add(random_prompt(16, 0)), driver.add(random_prompt(3, 1))
    driver.prefill(seq)
    (source,), copied, back = seq.blocks, driver.free.pop(), driver.free.pop()
    before = [entry[source].clone() for entry in cache_of(driver.runner)]
    driver.run([(other, 3)], blocks_to_copy=[(source, copied)], blocks_to_swap_out=[(source, 0)])
    driver.run([(other, 1)], blocks_to_zero=[source], blocks_to_swap_in=[(0, back)])
    for entry, content in zip(cache_of(driver.runner), before, strict=True):
        assert content.any() and not entry[source].any()
        assert torch.equal(entry[copied], content) and torch.equal(entry[back], content)


@NEEDS_NATIVE
def test_scales_of_int8_go_with_their_block(wide: tuple[Path, LlamaForCausalLM]) -> None:
    """A row goes on from copies of its blocks as from the blocks."""
    driver = make_driver(wide[0], kv_cache_dtype="int8")
    seen = capture_logits(driver)
    seq, other = driver.add(random_prompt(30, 0)), driver.add(random_prompt(3, 1))
    driver.prefill(seq)
    copies = [driver.free.pop() for _ in seq.blocks]
    driver.run([(other, 3)], blocks_to_copy=list(zip(seq.blocks, copies, strict=True)))
    blocks, tokens = seq.blocks, list(seq.tokens)
    driver.decode(seq)
    expected = seen[-1][0]
    copied = driver.add(tokens[:30])
    copied.blocks, copied.num_computed, copied.tokens = copies, 30, tokens
    driver.run([(copied, 1)])
    assert blocks != copies and torch.equal(seen[-1][0], expected)


@NEEDS_NATIVE
def test_ranks_keep_int8_of_their_heads(wide: tuple[Path, LlamaForCausalLM]) -> None:
    """Scales are of a head, so two ranks round as one does."""
    outputs = []
    for size in (1, 2):
        config = tiny_config(wide[0], kv_cache_dtype="int8", quantization="none", tensor_parallel_size=size)
        with running(config) as executor:
            driver = driver_of(executor)
            seqs = [driver.add(random_prompt(n, n)) for n in (3, 20)]
            driver.prefill(*seqs)
            driver.decode(*seqs, steps=15)
            outputs.append([seq.output for seq in seqs])
    assert outputs[0] == outputs[1]


def test_a_token_sees_the_same_however_the_work_is_cut(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """Keys and values are rounded before the first token reads them: chunks, a cached prefix and single tokens give
    the logits of one long step, but for a number that the last bits of a float round up or down (with exact keys in
    the long step they would be apart by 1)."""
    driver = make_driver(tiny[0], kv_cache_dtype="fp8")
    seen = capture_logits(driver)
    prompt = random_prompt(40, 0)
    whole, chunks, single = (driver.add(prompt) for _ in range(3))
    driver.prefill(whole)
    driver.run([(chunks, 17)])
    driver.run([(chunks, 23)])
    for _ in range(40):
        driver.run([(single, 1)])
    prefix = driver.add(prompt, prefix=chunks)
    driver.prefill(prefix)
    expected, *others = (logits[0] for logits in seen if len(logits))
    for found in (others[0], others[-2], others[-1]):
        assert (found - expected).abs().max() < 0.02


def test_it_takes_a_quarter_of_float32(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    config = RunnerConfig(model=str(tiny[0]), device="cpu", kv_cache_gib=2**-11, max_num_seqs=64, quantization="none")
    (_, plain), (_, small) = (build_runner(replace(config, kv_cache_dtype=name), Group()) for name in ("auto", "fp8"))
    assert (plain.num_blocks, small.num_blocks) == (85, 341)  # blocks of 6,144 and 1,536 bytes in half a MiB


@NEEDS_NATIVE
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"quantization": "int8"}, DEFAULT),
        ({"quantization": "int8", "block_size": 1}, torch.bfloat16),
        ({"quantization": "int8", "kv_cache_dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization": "int8", "kv_cache_dtype": "activations"}, torch.float32),
        ({"quantization": "none"}, torch.float32),
        ({"quantization": "none", "kv_cache_dtype": "bfloat16"}, torch.bfloat16),
        ({"quantization": "none", "kv_cache_dtype": "int8"}, torch.int8),
    ],
    ids=str,
)
def test_beside_whole_numbers_it_is_of_int8(
    wide: tuple[Path, LlamaForCausalLM], options: dict[str, Any], dtype: torch.dtype
) -> None:
    assert dtype_of(make_driver(wide[0], **options)) == dtype


@NEEDS_NATIVE
def test_without_vnni_it_is_of_bfloat16(wide: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "this_cpu", lambda: frozenset(("avx2", "fma", "f16c")))
    assert dtype_of(make_driver(wide[0], quantization="int8")) == torch.bfloat16
    assert dtype_of(make_driver(wide[0], quantization="int8", kv_cache_dtype="int8")) == torch.int8


@NEEDS_NATIVE
@pytest.mark.parametrize(("cache", "dtype"), [("auto", torch.bfloat16), ("int8", torch.int8)])
def test_keys_with_a_bias_are_of_bfloat16_unless_asked_for(tmp_path: Path, cache: str, dtype: torch.dtype) -> None:
    save_llama(tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=True)
    assert dtype_of(make_driver(tmp_path, quantization="int8", kv_cache_dtype=cache)) == dtype


def dtype_of(driver: Driver) -> torch.dtype:
    layer, *_ = driver.runner._model.cache_layers()
    return layer.cache.k.dtype


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
def test_what_only_native_kernels_keep(tiny: tuple[Path, LlamaForCausalLM], name: str) -> None:
    with pytest.raises(ModelConfigError, match=f"kv-cache-dtype {name} needs native kernels, which are for CPUs"):
        make_driver(tiny[0], kernel_backend="torch", kv_cache_dtype=name)


@NEEDS_NATIVE
def test_int8_has_blocks_of_many_tokens(wide: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelConfigError, match="int8 needs a block-size that is a multiple of 16"):
        make_driver(wide[0], block_size=1, kv_cache_dtype="int8")


@NEEDS_NATIVE
def test_int8_takes_its_scales_into_account(wide: tuple[Path, LlamaForCausalLM]) -> None:
    config = RunnerConfig(model=str(wide[0]), device="cpu", kv_cache_gib=2**-11, quantization="none")
    (_, plain), (_, small) = (build_runner(replace(config, kv_cache_dtype=name), Group()) for name in ("auto", "int8"))
    assert (plain.num_blocks, small.num_blocks) == (42, 136)  # blocks of 12,288 and 3,840 bytes in half a MiB


@NEEDS_NATIVE
@pytest.mark.parametrize("cache_dtypes", [(torch.bfloat16,), (torch.int8, torch.bfloat16)], ids=str)
def test_layers_whose_kernel_keeps_nothing_smaller_stay_float32(cache_dtypes: tuple[torch.dtype, ...]) -> None:
    setup = LayerSetup(
        Kernels(torch.device("cpu")), ALONE, torch.float32, quantization="int8", cache_dtypes=cache_dtypes
    )
    spec = GqaSpec(6, 2, 16, 1.0, torch.float32)
    assert setup.with_cache(spec).dtype == cache_dtypes[0]
    windowed = replace(spec, window=8)
    assert setup.with_cache(windowed) == windowed


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_scales_of_a_checkpoint(tmp_path: Path, cache: str) -> None:
    """Used where the cache is of float8, and left alone where it is not."""
    model = with_scales(tmp_path, SCALES)
    driver = make_driver(tmp_path, kv_cache_dtype=cache)
    (layer, *_) = driver.runner._model.cache_layers()
    assert (layer.cache.k_scale, layer.cache.v_scale) == (SCALES if cache == "fp8" else (1.0, 1.0))
    assert error_of(driver, model) < (0.05 if cache == "fp8" else 1e-5)


def test_keys_are_divided_by_their_scale(tmp_path: Path) -> None:
    """So that those of the checkpoint fit into the range."""
    with_scales(tmp_path, SCALES)
    small, plain = make_driver(tmp_path, kv_cache_dtype="fp8"), make_driver(tmp_path)
    seqs = [driver.add(random_prompt(16, 0)) for driver in (small, plain)]
    for driver, seq in zip((small, plain), seqs, strict=True):
        driver.prefill(seq)
    for found, exact, scale in zip(cache_of(small.runner), cache_of(plain.runner), SCALES, strict=True):
        keys = found[seqs[0].blocks[0], 0].view(torch.float8_e4m3fn).float() * scale
        expected = exact[seqs[1].blocks[0], 0]
        assert (keys - expected).abs().max() < expected.abs().max() / 16


@pytest.mark.parametrize("scales", [(0.0, 1.0), (torch.nan, 1.0), (1.0,)])
def test_scales_that_are_none(tmp_path: Path, scales: tuple[float, ...]) -> None:
    with_scales(tmp_path, scales)
    message = r"k_scale: it is \[.*; one number above 0" if len(scales) == 2 else r"missing: .*\.v_scale"
    with pytest.raises(WeightsError, match=message):
        make_driver(tmp_path, kv_cache_dtype="fp8")
