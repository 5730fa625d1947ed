"""Gemma 4 (text)."""

from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4TextConfig

from tests.models.cases import SMALL

SMALL_GEMMA4 = SMALL | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "sliding_window": 20, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99, "final_logit_softcapping": 5.0,
}  # fmt: skip
LARGE_GEMMA4 = SMALL | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 20,
    "num_key_value_heads": 4, "global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "attention_bias": True,
    "final_logit_softcapping": 5.0,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 4, "patch_size": 2,
}  # fmt: skip
MOE_GEMMA4 = LARGE_GEMMA4 | {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip
ATTENTION = "GQA, in most layers a window and smaller heads; last layers may share keys, or keys be values"
CASES = {
    "gemma4": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**SMALL_GEMMA4)),
    "gemma4-moe": lambda: Gemma4ForCausalLM(Gemma4TextConfig(**MOE_GEMMA4)),
    "gemma4-vision": lambda: Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=LARGE_GEMMA4, vision_config=VISION)
    ),
}
