"""Gemma 3 (text)."""

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.models.cases import SMALL

GEMMA3 = SMALL | {
    "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0, "attention_bias": True,
}  # fmt: skip
ATTENTION = "GQA, a window in most layers"
CASES = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3)),
    "gemma3-wide-window": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GEMMA3 | {"sliding_window": 512, "tie_word_embeddings": False})
    ),
}
