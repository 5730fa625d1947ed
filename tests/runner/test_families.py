"""Each family at a tiny configuration against `transformers`: logits within 1e-4 through the paged cache, in mixed
batches, chunks and single tokens, and greedy tokens of 64 steps."""

from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.runner.conftest import TINY, greedy_reference, make_driver, random_prompt
from tests.runner.test_logits import assert_logits, capture_logits

LATENT = TINY | {
    "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_key_value_heads": 6, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_rope_head_dim": 16, "head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3,
}  # fmt: skip
INDEX = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 8}
FAMILIES = {
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**(LATENT | EXPERTS | {"rope_parameters": YARN}))),
    "deepseek-v3-plain-queries": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**(LATENT | {"q_lora_rank": None, "rope_interleave": False}))
    ),
    "deepseek-v32": lambda: DeepseekV32ForCausalLM(DeepseekV32Config(**(LATENT | EXPERTS | INDEX))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**(TINY | {"sliding_window": None}))),
    "mistral-untied": lambda: MistralForCausalLM(
        MistralConfig(**(TINY | {"sliding_window": None, "tie_word_embeddings": False}))
    ),
    # Wide enough for the kernels that a CPU has of its own.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**(TINY | {"head_dim": 16, "intermediate_size": 96}))),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **(TINY | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}),
            norm_topk_prob=True,
            mlp_only_layers=[0],
        )
    ),
    "qwen3-bias": lambda: Qwen3ForCausalLM(Qwen3Config(**(TINY | {"attention_bias": True}))),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    torch.manual_seed(0)
    model = FAMILIES[request.param]().float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path, model


def test_logits_equal_transformers(family: tuple[Path, PreTrainedModel]) -> None:
    path, model = family
    driver = make_driver(path)
    seen = capture_logits(driver)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 16, 33)]
    driver.prefill(*seqs[:2])
    driver.run([(seqs[0], 1), (seqs[2], 20)])
    driver.run([(seqs[2], 13), (seqs[1], 1)])
    for row, seq in zip(seen[-1], (seqs[1], seqs[2]), strict=True):
        assert_logits(row, model, seq.tokens[:-1])


def test_greedy_tokens_equal_transformers(family: tuple[Path, PreTrainedModel]) -> None:
    path, model = family
    driver = make_driver(path)
    seqs = [driver.add(random_prompt(n, n)) for n in (1, 5, 17)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=63)
    for seq in seqs:
        assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], 64)
