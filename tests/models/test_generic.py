"""Models through `transformers` around our attention: some that fissile has no file for, and one that it has. They pass
the tests of the families, which this file collects a second time."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, chunked_overlay, sliding_window_causal_mask_function

from tests.models.cases import SMALL, VOCABULARY
from tests.models.saved import Saved, save
from tests.models.test_cases import (  # noqa: F401
    test_logits_at_every_position_and_greedy_tokens,
    test_mixed_batches_and_chunks,
    test_prefix_reuse_and_preemption_through_the_scheduler,
)
from tests.runner.conftest import make_driver, random_prompt
from worker.kernels.select import Kernels
from worker.layers.attention import GqaAttention
from worker.layers.setup import LayerSetup
from worker.loader.errors import ModelConfigError, UnknownArchitectureError, WeightsError
from worker.loader.load_config import load_common_config
from worker.loader.source import resolve_model
from worker.models.replaced_attention import AttentionProbe
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

SLIDING, FULL = "sliding_attention", "full_attention"
PLAIN = {key: value for key, value in SMALL.items() if key != "head_dim"}
CASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**PLAIN)),
    "phi3-window": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**PLAIN | {"sliding_window": 20, "tie_word_embeddings": True})
    ),
    "granite-multipliers": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(**PLAIN, attention_multiplier=0.2, embedding_multiplier=2.0, logits_scaling=3.0)
    ),
    # Experts are a tensor each in the file, and one in the model.
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**PLAIN, num_experts=6, num_experts_per_tok=2)),
    "cohere2-windows": lambda: hf.Cohere2ForCausalLM(
        hf.Cohere2Config(**SMALL | {"sliding_window": 20, "layer_types": [SLIDING, FULL, SLIDING]})
    ),
    # Positions are embeddings.
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=99, n_embd=48, n_layer=3, n_head=4, n_positions=256, initializer_range=0.3)
    ),
    "gpt-oss-sinks": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20})
    ),
}
PROMPT = random_prompt(20, 1, VOCABULARY)
THROUGH = {"model_impl": "transformers"}


@pytest.fixture(scope="module")
def saved_generic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    folder = tmp_path_factory.mktemp("generic")
    return {name: save(make, folder / name, THROUGH) for name, make in CASES.items()}


@pytest.fixture(params=CASES)
def saved(request: pytest.FixtureRequest, saved_generic: dict[str, Saved]) -> Saved:
    return saved_generic[request.param]


def test_each_kind_of_layer_has_a_cache_of_its_own(saved_generic: dict[str, Saved]) -> None:
    parts = make_driver(saved_generic["cohere2-windows"].path, **THROUGH).runner._parts
    layers = [layer for layer in parts.model.cache_layers() if isinstance(layer, GqaAttention)]
    assert [layer.spec.shape.window for layer in layers] == [20, None, 20]
    assert len(parts.builders) == 2


def test_fields_are_found_under_a_familys_own_names(saved_generic: dict[str, Saved]) -> None:
    config = load_common_config(resolve_model(str(saved_generic["gpt2"].path)), "transformers")
    assert (config.vocab_size, config.max_model_len, config.architecture) == (99, 256, "GPT2LMHeadModel")


def test_it_says_that_it_is_slower(saved_generic: dict[str, Saved], caplog: pytest.LogCaptureFixture) -> None:
    make_driver(saved_generic["olmo2"].path, **THROUGH, load_format="dummy")
    assert f"Olmo2ForCausalLM runs through transformers {hf.__version__}: slower" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_begin_with_the_same_token(saved_generic: dict[str, Saved], dtype: str) -> None:
    for saved in saved_generic.values():
        saved.assert_greedy(PROMPT, tokens_of(saved.path, 1, **THROUGH, dtype=dtype))


def test_a_cache_of_float8_is_as_rounded_as_that_of_our_own_model(saved_generic: dict[str, Saved]) -> None:
    own, through = (
        tokens_of(saved_generic["llama"].path, 16, kv_cache_dtype="fp8", **options) for options in ({}, THROUGH)
    )
    assert own == through


def tokens_of(path: Path, num_tokens: int, **options: object) -> list[int]:
    driver = make_driver(path, **options)
    seq = driver.add(PROMPT)
    driver.prefill(seq)
    driver.decode(seq, steps=num_tokens - 1)
    return seq.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu(saved_generic: dict[str, Saved]) -> None:
    for saved in saved_generic.values():
        saved.assert_greedy(PROMPT, tokens_of(saved.path, 16, **THROUGH, device="cuda", dtype="float32"))


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(ModelConfigError) as raised:
        make_driver(path, **THROUGH | options)
    return str(raised.value)


def saved_config(path: Path, config: hf.PretrainedConfig, **fields: object) -> Path:
    config.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | fields))
    return path


REFUSED = {
    "soft cap": (
        hf.Gemma2Config(**SMALL), "Gemma2ForCausalLM", "a layer's attention asks for softcap, which is not supported",
    ),
    "state": (
        hf.Qwen3NextConfig(
            **SMALL | {"num_experts": 4, "num_experts_per_tok": 2}, linear_num_value_heads=4, linear_num_key_heads=2
        ),
        "Qwen3NextForCausalLM", "0 attention layers can be replaced, num_hidden_layers is 3: all must be",
    ),
    "state beside attention": (
        hf.FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
        "FalconH1ForCausalLM", "tokens know of others not by attention alone",
    ),
    "both ways": (
        hf.BertConfig(**PLAIN), "BertLMHeadModel", "a layer has a mask that is neither causal nor that of a window",
    ),
    "no body": (
        hf.OPTConfig(**PLAIN, ffn_dim=64, word_embed_proj_dim=48), "OPTForCausalLM", "cannot be run through",
    ),
    "no context": (hf.BloomConfig(vocab_size=99), "BloomForCausalLM", "config.json lacks max_position_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused(name: str, tmp_path: Path) -> None:
    config, architecture, said = REFUSED[name]
    assert said in refusal(saved_config(tmp_path, config, architectures=[architecture]), load_format="dummy")


def test_other_models_than_decoders_are_refused_by_field(tmp_path: Path) -> None:
    llama = hf.LlamaConfig(**SMALL)
    for fields, said in (
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "has no decoder of that type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has LlamaForCausalLM for it"),
        ({"is_encoder_decoder": True}, "config.json: is_encoder_decoder is True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "config.json: quantization_config is {"),
        ({"attn_implementation": "somebody/kernel"}, "config.json: attn_implementation is 'somebody/kernel'"),
        ({"_experts_implementation": "mine"}, "config.json: _experts_implementation is 'mine'"),
        ({"vocab_size": -3}, "config.json: vocab_size is -3"),
        ({"hidden_size": "wide"}, "config.json: transformers cannot read it: "),
    ):
        saved_config(tmp_path, llama, **{"architectures": ["LlamaForCausalLM"]} | fields)
        assert said in refusal(tmp_path, load_format="dummy")


def test_a_models_own_code_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(marker)!r}, 'w')")
    automap = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    for model_type in ("mine", "llama"):
        saved_config(tmp_path, hf.LlamaConfig(**SMALL), model_type=model_type, architectures=["Mine"], auto_map=automap)
        with pytest.raises(UnknownArchitectureError, match="code that comes with a model is never run"):
            make_driver(tmp_path, **THROUGH)
    saved_config(tmp_path, hf.LlamaConfig(**SMALL), architectures=["LlamaForCausalLM"], auto_map=automap)
    make_driver(tmp_path, **THROUGH, load_format="dummy")
    assert not marker.exists()


def test_settings_that_it_has_no_way_to_obey_are_refused(saved_generic: dict[str, Saved], tmp_path: Path) -> None:
    path = saved_generic["llama"].path
    assert "tensor_parallel_size 1" in refusal_of_two_ranks(path)
    (tmp_path / "a.gguf").touch()
    assert "is a GGUF file" in refusal(tmp_path / "a.gguf")


def refusal_of_two_ranks(path: Path) -> str:
    config = RunnerConfig(model=str(path), device="cpu", model_impl="transformers", tensor_parallel_size=2)
    with pytest.raises(ModelConfigError) as raised:
        build_runner(config, Group(0, 2, None))
    return str(raised.value)


def test_tensors_that_do_not_fit_are_named(saved_generic: dict[str, Saved], tmp_path: Path) -> None:
    folder = saved_generic["llama"].path
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.nobody.weight"] = torch.zeros(3)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing: model.norm.weight; 1 unexpected: model.nobody.weight"):
        make_driver(tmp_path, **THROUGH)


def test_contexts_end_where_the_angles_of_others_would_change(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64} | factors
    config = hf.Phi3Config(**PLAIN, rope_parameters=rope, original_max_position_embeddings=64)
    saved_config(tmp_path, config, architectures=["Phi3ForCausalLM"])
    found = load_common_config(resolve_model(str(tmp_path)), "transformers")
    assert found.max_model_len == 64 and "contexts end at original_max_position_embeddings, 64" in found.remarks[0]


def test_masks_are_told_apart() -> None:
    setup = LayerSetup(Kernels(torch.device("cpu")), Group(), torch.float32)
    probe = AttentionProbe(setup, 100)
    assert probe.window(causal_mask_function) is None
    assert probe.window(sliding_window_causal_mask_function(20)) == 20
    assert probe.window(sliding_window_causal_mask_function(100)) is None
    chunked = chunked_overlay(30, torch.zeros(1, dtype=torch.int64))
    for other in (chunked, lambda b, h, q, kv: kv >= 0, lambda b, h, q, kv: (kv <= q) & (kv != 7)):
        with pytest.raises(ModelConfigError, match="neither causal nor that of a window"):
            probe.window(other)
