"""Gemma 3 (text)."""

from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

from tests.models.cases import SMALL

GEMMA3 = SMALL | {
    "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0, "attention_bias": True,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip
ATTENTION = "GQA, a window in most layers"
CASES = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3)),
    "gemma3-vision-wide-window": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=GEMMA3 | {"sliding_window": 512, "final_logit_softcapping": None},
            vision_config=VISION,
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
        )
    ),
}
