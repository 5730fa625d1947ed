"""DeepSeek-V3, V3.2, Kimi-K2."""

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

from tests.models.cases import SMALL

LATENT = SMALL | {
    "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 6, "num_key_value_heads": 6,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3,
}  # fmt: skip
INDEX = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 24, "pad_token_id": None}
"""So many heads that no score is 0, nor is the embedding of a token, as padding's is: of equal scores `transformers`
takes any."""
ATTENTION = "MLA, an index in V3.2"
CASES = {
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT | EXPERTS | {"rope_parameters": YARN})),
    "deepseek-v3-plain-queries": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**LATENT | {"q_lora_rank": None, "rope_interleave": False})
    ),
    "deepseek-v32": lambda: DeepseekV32ForCausalLM(DeepseekV32Config(**LATENT | EXPERTS | INDEX)),
}
