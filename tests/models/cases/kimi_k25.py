"""Kimi-K2.5 (text)."""

from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from tests.models.cases.deepseek import EXPERTS, LATENT, YARN

VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 2,
    "pos_emb_height": 2, "pos_emb_width": 2,
}  # fmt: skip
TEXT = LATENT | EXPERTS | {"model_type": "deepseek_v3", "rope_parameters": YARN, "n_shared_experts": 1}
ATTENTION = "MLA"
CASES = {
    "kimi-k2.5": lambda: Kimi_K25ForConditionalGeneration(
        Kimi_K25Config(text_config=TEXT, vision_config=VISION, projection_hidden_size=16, tie_word_embeddings=False)
    ),
}
