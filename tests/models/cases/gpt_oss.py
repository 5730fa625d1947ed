"""GPT-OSS."""

from transformers import GptOssConfig, GptOssForCausalLM

from tests.models.cases import SMALL

GPT_OSS = SMALL | {
    "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20,
    # Low enough for gates and ups of these weights to reach it.
    "swiglu_limit": 2.0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
ATTENTION = "GQA with sinks, a window in every second layer"


def gpt_oss() -> GptOssForCausalLM:
    model = GptOssForCausalLM(GptOssConfig(**GPT_OSS))
    for layer in model.model.layers:
        layer.mlp.experts.limit = GPT_OSS["swiglu_limit"]  # older transformers do not read it
    return model


CASES = {"gpt-oss": gpt_oss}
