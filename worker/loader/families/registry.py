"""Families by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable

from worker.loader.config import ModelConfig
from worker.loader.families.deepseek import deepseek_v3_config, deepseek_v32_config
from worker.loader.families.gemma3 import gemma3_config
from worker.loader.families.gemma3_vision import gemma3_vision_config
from worker.loader.families.gemma4 import gemma4_config
from worker.loader.families.gemma4_vision import gemma4_vision_config
from worker.loader.families.glm4_moe import glm4_moe_config
from worker.loader.families.gpt_oss import gpt_oss_config
from worker.loader.families.kimi_k25 import kimi_k25_config
from worker.loader.families.llama import llama_config
from worker.loader.families.mimo_v2 import mimo_v2_flash_config
from worker.loader.families.mistral import mistral_config
from worker.loader.families.mixtral import mixtral_config
from worker.loader.families.qwen2 import qwen2_config
from worker.loader.families.qwen3 import qwen3_config
from worker.loader.families.qwen3_5 import qwen3_5_config, qwen3_5_moe_config
from worker.loader.families.qwen3_moe import qwen3_moe_config
from worker.loader.families.qwen3_next import qwen3_next_config
from worker.loader.fields import Fields

FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "DeepseekV32ForCausalLM": deepseek_v32_config,
    "DeepseekV3ForCausalLM": deepseek_v3_config,
    "Gemma3ForCausalLM": gemma3_config,
    "Gemma3ForConditionalGeneration": gemma3_vision_config,
    "Gemma4ForCausalLM": gemma4_config,
    "Gemma4ForConditionalGeneration": gemma4_vision_config,
    "Glm4MoeForCausalLM": glm4_moe_config,
    "GptOssForCausalLM": gpt_oss_config,
    "KimiK25ForConditionalGeneration": kimi_k25_config,
    "Kimi_K25ForConditionalGeneration": kimi_k25_config,  # as `transformers` calls it
    "LlamaForCausalLM": llama_config,
    "MiMoV2FlashForCausalLM": mimo_v2_flash_config,
    "MistralForCausalLM": mistral_config,
    "MixtralForCausalLM": mixtral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
    "Qwen3MoeForCausalLM": qwen3_moe_config,
    "Qwen3_5ForCausalLM": qwen3_5_config,
    "Qwen3_5ForConditionalGeneration": qwen3_5_config,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe_config,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_config,
    "Qwen3NextForCausalLM": qwen3_next_config,
}
"""Each reads all fields that its models need, apart from `architectures` and ending tokens. `worker/models/registry.py`
has a model for each."""
