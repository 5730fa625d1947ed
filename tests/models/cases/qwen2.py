"""Qwen2."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.models.cases import SMALL

QWEN2 = {key: value for key, value in SMALL.items() if key != "head_dim"}
ATTENTION = "GQA, a window in later layers"
CASES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**QWEN2)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**QWEN2 | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1})
    ),
}
