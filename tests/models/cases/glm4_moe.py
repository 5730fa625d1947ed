"""GLM-4.5."""

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.models.cases import SMALL

GLM = SMALL | {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
ATTENTION = "GQA, half of a head rotated"
CASES = {
    "glm4-moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**GLM | {"use_qk_norm": True, "attention_bias": True})),
    "glm4-moe-groups": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**GLM | {"n_group": 4, "topk_group": 2})),
}
