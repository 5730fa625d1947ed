"""Architectures of GGUF files: which model each is, and how its tensors are called and stored. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ARCHITECTURE = "general.architecture"
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GLM = {
    "post_attention_norm": "post_attention_layernorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.")


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    architecture: str
    """Of its Hugging Face twin."""
    has_neighbouring_pairs: bool = False
    """Rows of the projections to queries and keys are stored so that rotary pairs are neighbours (i, i + 1), in place
    of (i, i + D/2)."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer beyond those that all have, or under another name."""

    has_qkv_bias: bool = False
    has_offset_norms: bool = False
    """Weights of norms are stored plus 1, those of the Hugging Face twin are not."""

    def hf_name(self, name: str) -> str:
        """In the place of an expert's number, `{}`, where the tensor is of all of them. A name without a counterpart is
        kept, and then reported as unexpected."""
        match = _BLOCK_NAME.fullmatch(name)
        if match is None:
            return _TOP.get(name, name)
        module = self.others.get(match[2], _DENSE.get(match[2]))
        whole = name if module is None else f"model.layers.{match[1]}.{module}.{match[3]}"
        return whole.replace("e_score_correction.bias", "e_score_correction_bias")

    def pairs_neighbours(self, hf_name: str) -> bool:
        return self.has_neighbouring_pairs and _ROTATED.search(hf_name) is not None

    def offset(self, hf_name: str) -> float:
        """What the file adds to this tensor."""
        return 1.0 if self.has_offset_norms and hf_name.endswith("norm.weight") else 0.0


FAMILIES = {
    "gemma3": GGUFFamily("Gemma3ForCausalLM", others=_HEAD_NORMS | _SANDWICH_NORMS, has_offset_norms=True),
    "glm4moe": GGUFFamily("Glm4MoeForCausalLM", others=_HEAD_NORMS | _EXPERTS | _GLM),
    "llama": GGUFFamily("LlamaForCausalLM", has_neighbouring_pairs=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", others=_HEAD_NORMS),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", others=_HEAD_NORMS | _EXPERTS),
}
"""By what `general.architecture` says. Mistral's files say llama."""
