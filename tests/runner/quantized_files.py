"""Weights in the forms of quantised checkpoints, packed by hand after the formats' descriptions.

Each maker takes a weight [O, I] and gives the tensors that stand for it, by the last part of their names, and the
float32 weight that they mean.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

Made = tuple[dict[str, Tensor], Tensor]
Maker = Callable[[Tensor], Made]
FP8_MAX = 448.0
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours stands in each place of a word."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(numbers: Tensor, dim: int, bits: int, columns: Iterable[int] | None = None) -> Tensor:
    """int32: numbers without a sign, the first of those that share a word lowest; `columns`: or in this order."""
    per_word = 32 // bits
    padded = numbers.movedim(dim, -1).long()
    padded = torch.nn.functional.pad(padded, (0, -padded.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    packed = torch.zeros(padded.shape[:-1], dtype=torch.int64)
    for place, column in enumerate(columns or range(per_word)):
        packed |= padded[..., column] << (bits * place)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def fp8_block(weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32) -> Made:
    rows, columns = (-(-size // share) for size, share in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = part.abs().max() / FP8_MAX
    stored = scales.to(scale_dtype)
    spread = stored.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": stored}, numbers.float() * spread


def scaled(weight: Tensor, *, by_row: bool, is_float: bool = True, with_input: bool = False) -> Made:
    most = FP8_MAX if is_float else 127
    scale = (weight.abs().amax(1, keepdim=True) if by_row else weight.abs().max()) / most
    numbers = (weight / scale).to(torch.float8_e4m3fn) if is_float else (weight / scale).round().to(torch.int8)
    tensors = {"weight": numbers, "weight_scale": scale}
    return tensors | ({"input_scale": torch.tensor(0.5)} if with_input else {}), numbers.float() * scale


def grouped(weight: Tensor, groups: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(numbers without a sign [O, I], scales and zero points [O, G], what they mean); `groups`: of each input."""
    most = (1 << bits) - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        span = 2 * torch.maximum(-low, high) if symmetric else high - low
        scale = (span / most).half().float()
        scales.append(scale)
        zeros.append(torch.full_like(scale, most // 2 + 1) if symmetric else (-low / scale).round().clamp(0, most))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    numbers = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, most)
    return numbers.int(), scale, zero.int(), (numbers - zero[:, groups]) * scale[:, groups]


def in_order(weight: Tensor, size: int | None) -> Tensor:
    return torch.arange(weight.shape[1]) // (size or weight.shape[1])


def packed(weight: Tensor, size: int | None, bits: int = 4, *, symmetric: bool = True, shuffled: bool = False) -> Made:
    groups = in_order(weight, size)
    if shuffled:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    numbers, scales, zeros, exact = grouped(weight, groups, bits, symmetric=symmetric)
    tensors = {
        "weight_packed": words(numbers, 1, bits), "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros, 0, bits)
    if shuffled:
        tensors["weight_g_idx"] = groups.int()
    return tensors, exact


def awq(weight: Tensor, size: int) -> Made:
    numbers, scales, zeros, exact = grouped(weight, in_order(weight, size), 4, symmetric=False)
    return {
        "qweight": words(numbers.T, 1, 4, AWQ_COLUMNS),
        "qzeros": words(zeros.T, 1, 4, AWQ_COLUMNS),
        "scales": scales.half().T.contiguous(),
    }, exact


def gptq(weight: Tensor, size: int, bits: int = 4, *, symmetric: bool = True, shuffled: bool, less_one: bool) -> Made:
    groups = in_order(weight, size)
    if shuffled:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    numbers, scales, zeros, exact = grouped(weight, groups, bits, symmetric=symmetric)
    stored = (zeros - 1) & ((1 << bits) - 1) if less_one else zeros
    return {
        "qweight": words(numbers.T, 0, bits),
        "qzeros": words(stored.T, 1, bits),
        "scales": scales.half().T.contiguous(),
        "g_idx": groups.int(),
    }, exact


def mxfp4(weight: Tensor) -> Made:
    """[E, I, O], I a multiple of 32."""
    parts = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(parts.abs().amax(-1).clamp(min=1e-30))) - 2
    steps = torch.exp2(exponents)[..., None]
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    nibbles = ((parts / steps)[..., None] - table).abs().argmin(-1).to(torch.uint8)
    exact = (table[nibbles.long()] * steps).flatten(-2).transpose(1, 2)
    blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return {"blocks": blocks.contiguous(), "scales": (exponents + 127).to(torch.uint8)}, exact


def quantize_files(folder: Path, model: LlamaForCausalLM, make: Maker, section: dict[str, Any], key: str) -> None:
    """Rewrites a saved model's linear layers, and gives `model` the weights that the files mean."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            made, exact = make(tensors.pop(name))
            module = name.removesuffix("weight")
            tensors |= {module + part: tensor for part, tensor in made.items()}
            with torch.no_grad():
                parameter.copy_(exact)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: section}))
