"""Checkpoint of a GGUF file under Hugging Face's names: dequantised as it is read."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from worker.kernels.weights import Blocks
from worker.loader.config import ModelConfig
from worker.loader.errors import WeightsError
from worker.loader.gguf_blocks import read_blocks
from worker.loader.gguf_file import GGUFTensor, read_gguf

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
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
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IN_CONFIG = {"rope_freqs.weight"}
_INTERLEAVED = re.compile(r"\.self_attn\.[qk]_proj\.")
"""llama.cpp stores the rows of q and k so that rotary pairs are neighbours (i, i + 1) in place of (i, i + D/2)."""


class GGUFCheckpoint:
    """Implements `Checkpoint` for llama-like GGUF files."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._head_dim = config.head_dim
        tensors = read_gguf(path).tensors
        self._tensors = {_hf_name(name): tensor for name, tensor in tensors.items() if name not in _IN_CONFIG}

    def names(self) -> Iterable[str]:
        return self._tensors

    def tensor(self, name: str, packed: bool = False) -> "GGUFLazyTensor":
        interleaved = _INTERLEAVED.search(name) is not None
        return GGUFLazyTensor(self._tensors[name], self._head_dim if interleaved else None)


class GGUFLazyTensor:
    """Implements `LazyTensor`. Slices of the first dimension dequantise only their rows."""

    def __init__(self, tensor: GGUFTensor, interleaved_head_dim: int | None) -> None:
        self._tensor = tensor
        self._head_dim = interleaved_head_dim
        self.shape = tensor.shape

    def read(self, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        if len(self.shape) == 1:
            values = torch.from_numpy(self._tensor.rows(0, 1).copy())[0]
            values = self._to_neox(values[:, None], self._head_dim)[:, 0] if self._head_dim else values
            return values if length is None else values[start : start + length]
        if len(self.shape) != 2:
            raise WeightsError(f"GGUF tensors of {len(self.shape)} dimensions are not supported")
        if dim == 0:
            rows = self._rows(start, self.shape[0] if length is None else length)
            return self._to_neox(rows, self._head_dim) if self._head_dim else rows
        rows = self.read()
        return rows if length is None else rows[:, start : start + length]

    def blocks(self, start: int, length: int) -> Blocks | None:
        if len(self.shape) != 2:
            return None
        found = read_blocks(self._tensor.data[start : start + length], self._tensor.type)
        if found is None or self._head_dim is None:
            return found
        order = torch.arange(length)[:, None]
        return found.select(self._to_neox(order, self._head_dim)[:, 0])

    def _rows(self, start: int, length: int) -> Tensor:
        return torch.from_numpy(self._tensor.rows(start, length).copy())

    @staticmethod
    def _to_neox(rows: Tensor, head_dim: int) -> Tensor:
        """Whole heads of rows, from neighbouring pairs to halves."""
        return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    """Names without a counterpart are kept, and then reported as unexpected."""
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _BLOCK:
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
    return _TOP.get(name, name)
