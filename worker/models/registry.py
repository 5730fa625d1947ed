"""Models by the architecture name of their Hugging Face configuration."""

from collections.abc import Callable
from typing import Any

from worker.layers.setup import LayerSetup
from worker.loader.config import ModelConfig
from worker.models.base import CausalLM
from worker.models.deepseek import DeepseekForCausalLM, deepseek_mtp_layer
from worker.models.dense import DecoderForCausalLM
from worker.models.gemma3 import Gemma3ForCausalLM
from worker.models.gemma4 import Gemma4ForCausalLM
from worker.models.gpt_oss import GptOssForCausalLM
from worker.models.llama import LlamaForCausalLM
from worker.models.mimo_v2 import MimoV2FlashForCausalLM, mimo_mtp_layer
from worker.models.mistral import MistralForCausalLM
from worker.models.mixtral import MixtralForCausalLM
from worker.models.moe import MoeForCausalLM, moe_mtp_layer
from worker.models.mtp import MtpHead, MtpKind
from worker.models.qwen2 import Qwen2ForCausalLM
from worker.models.qwen3 import Qwen3ForCausalLM
from worker.models.qwen3_5 import Qwen35ForCausalLM
from worker.models.qwen3_next import Qwen3NextForCausalLM, hybrid_mtp_layer
from worker.models.stored_mtp import as_mimo_has_it, as_qwen_has_it, behind_the_last

MODELS: dict[str, Callable[[Any, LayerSetup], CausalLM]] = {
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "DeepseekV32ForCausalLM": DeepseekForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForCausalLM,
    "Glm4MoeForCausalLM": MoeForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "KimiK25ForConditionalGeneration": DeepseekForCausalLM,
    "Kimi_K25ForConditionalGeneration": DeepseekForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MiMoV2FlashForCausalLM": MimoV2FlashForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": MoeForCausalLM,
    "Qwen3_5ForCausalLM": Qwen35ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen35ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen35ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen35ForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
}
"""One for each architecture that the loader reads configurations of; it takes what the family's parser there makes."""

OF_QWEN = MtpKind(hybrid_mtp_layer, as_qwen_has_it, passes_on_normed=True)
MTP_KINDS: dict[str, MtpKind] = {
    "DeepseekV3ForCausalLM": MtpKind(deepseek_mtp_layer, behind_the_last),
    "DeepseekV32ForCausalLM": MtpKind(deepseek_mtp_layer, behind_the_last),
    "Glm4MoeForCausalLM": MtpKind(moe_mtp_layer, behind_the_last),
    "MiMoV2FlashForCausalLM": MtpKind(mimo_mtp_layer, as_mimo_has_it, passes_on_normed=True),
    "Qwen3_5ForCausalLM": OF_QWEN,
    "Qwen3_5ForConditionalGeneration": OF_QWEN,
    "Qwen3_5MoeForCausalLM": OF_QWEN,
    "Qwen3_5MoeForConditionalGeneration": OF_QWEN,
    "Qwen3NextForCausalLM": OF_QWEN,
}
"""Of architectures whose checkpoints may have layers for multi-token prediction."""


def create_mtp(config: ModelConfig, setup: LayerSetup, model: CausalLM, num_layers: int, max_tokens: int) -> MtpHead:
    """That of `model`, with uninitialised weights; see `MtpHead`. The architecture is one of `MTP_KINDS`."""
    assert isinstance(model, DeepseekForCausalLM | DecoderForCausalLM)
    kind = MTP_KINDS[config.architecture]
    layers = [kind.make(config, setup) for _ in range(num_layers)]
    return MtpHead(
        setup, layers, kind.stored(config.num_layers), model.model.embed_tokens, model.lm_head, config.vocab_size,
        config.hidden_size, max_tokens, passes_on_normed=kind.passes_on_normed,
    )  # fmt: skip


def create_model(config: ModelConfig, setup: LayerSetup) -> CausalLM:
    """The model with uninitialised weights on the kernels' device."""
    return MODELS[config.architecture](config, setup)
