"""Layers for multi-token prediction, computed plainly over the whole sequence: what drafts are held to."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MiMoV2FlashConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from tests.models.cases.mimo_v2 import MIMO
from tests.models.saved import Saved


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a family has it."""

    layer: Callable[[Any, int], nn.Module]
    """Of `transformers`, of a configuration and a layer's number."""
    number: int
    """That of a layer of its kind."""
    prefix: str
    """Of names; `{}` is the number behind the last layer's, or of the layer where there are several."""
    parts: dict[str, str]
    """What the checkpoint calls the product and the norms; the other names are the layer's, behind `within`."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Some of these."""
    within: str = ""
    copies: tuple[str, ...] = ()
    """Of the model's embedding and head."""
    num_layers: int = 1
    has_offset_norms: bool = False
    goes_on_normed: bool = False
    """Further drafts are of the state behind the last norm, not of the one before it."""
    are_experts_apart: bool = True
    rope_type: tuple[str, ...] = ()
    """What `transformers` calls its angles, where a model has several kinds."""
    window: int | None = None
    """A token sees the last so many, itself included."""


DEEPSEEK = partial(
    Form,
    prefix="model.layers.{}.",
    parts={"product": "eh_proj", "token": "enorm", "hidden": "hnorm", "last": "shared_head.norm"},
    copies=("embed_tokens", "shared_head.head"),
)
QWEN = partial(
    Form,
    prefix="mtp.",
    parts={"product": "fc", "token": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "last": "norm"},
    within="layers.0.",
    has_offset_norms=True,
    goes_on_normed=True,
)


def without_experts(config: MiMoV2FlashConfig, number: int) -> nn.Module:
    config = deepcopy(config)
    config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    return MiMoV2FlashDecoderLayer(config, number)


FORMS = {
    "deepseek-v3": DEEPSEEK(layer=DeepseekV3DecoderLayer, number=2),
    "deepseek-v32": DEEPSEEK(layer=DeepseekV32DecoderLayer, number=1),
    "glm4-moe": DEEPSEEK(layer=Glm4MoeDecoderLayer, number=2),
    "mimo-v2-flash": Form(
        layer=without_experts,
        number=1,
        prefix="model.mtp.layers.{}.",
        parts={"product": "eh_proj", "token": "enorm", "hidden": "hnorm", "last": "final_layernorm"},
        renamed={
            "self_attn.sinks": "self_attn.attention_sink_bias",
            "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
        },
        goes_on_normed=True,
        rope_type=("sliding_attention",),
        window=MIMO["sliding_window"],
        num_layers=2,
    ),
    # Experts are not as the model's own are: those of Qwen3-Next are apart, those of Qwen3.5 are not.
    "qwen3-next": QWEN(layer=Qwen3NextDecoderLayer, number=3, are_experts_apart=False),
    "qwen3.5": QWEN(layer=Qwen3_5DecoderLayer, number=3),
    "qwen3.5-moe": QWEN(layer=Qwen3_5MoeDecoderLayer, number=1),
}
"""By the names of cases."""


class Mtp:
    """Made of modules of `transformers`, saved beside the model's own weights."""

    def __init__(self, saved: Saved, form: Form) -> None:
        torch.manual_seed(7)
        self.saved, self._form = saved, form
        model: PreTrainedModel = saved.model
        self._decoder = model.get_decoder()
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        config = self._decoder.config
        self._layers = [self._make(config) for _ in range(form.num_layers)]
        numbers = range(form.num_layers) if form.num_layers > 1 else [config.num_hidden_layers]
        self.prefixes = [form.prefix.format(number) for number in numbers]
        self._save()
        for layer in self._layers:
            layer.to(model.dtype)
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def _make(self, config: Any) -> nn.ModuleDict:
        form, size = self._form, config.hidden_size
        norm = Qwen3NextRMSNorm if form.has_offset_norms else nn.RMSNorm
        parts = nn.ModuleDict({"layer": form.layer(config, form.number).eval()})
        parts.update({name: norm(size, config.rms_norm_eps) for name in ("token", "hidden", "last")})
        parts["product"] = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for parameter in parts.parameters():
                parameter.normal_(std=0.15 if parameter.dim() > 1 else 0.3)
                if parameter.dim() == 1 and not form.has_offset_norms:
                    parameter.add_(1)
        return parts

    def _save(self) -> None:
        form, file = self._form, self.saved.path / "model.safetensors"
        stored = load_file(file)
        found = dict(stored)
        for prefix, parts in zip(self.prefixes, self._layers, strict=True):
            tensors = parts["layer"].state_dict()
            if form.are_experts_apart:
                tensors = _apart(tensors)
            tensors = {form.within + form.renamed.get(name, name): value for name, value in tensors.items()}
            tensors |= {f"{stored_as}.weight": parts[name].weight for name, stored_as in form.parts.items()}
            for name, own in zip(form.copies, ("model.embed_tokens", "lm_head"), strict=False):
                tensors[f"{name}.weight"] = stored[f"{own}.weight"]
            found |= {prefix + name: value.detach().clone() for name, value in tensors.items()}
        save_file(found, file)

    @torch.no_grad()
    def drafts(self, text: list[int], length: int, num: int) -> list[int]:
        """Greedy ones behind the first `length` tokens: each by the next of the layers, which sees the state so many
        tokens before each token as it is the number of; further ones by the last, which goes on from its own."""
        with self.saved.precision:
            if tuple(text) not in self._hidden:
                self._hidden[tuple(text)] = self._decoder(torch.tensor([text]), use_cache=False).last_hidden_state[0]
            known = self._hidden[tuple(text)][: length - 1]
            drafts: list[int] = []
            own = known[:0]
            for number in range(num):
                turn = min(number, len(self._layers) - 1)
                previous = torch.cat((known.new_zeros(turn + 1, known.shape[1]), known, own))
                before = self._pass(self._layers[turn], torch.tensor([[*text[:length], *drafts]]), previous)[-1:]
                normed = self._layers[turn]["last"](before)
                drafts.append(int(self._head(normed[0]).argmax()))
                if turn == len(self._layers) - 1:
                    own = torch.cat((own, normed if self._form.goes_on_normed else before))
        return drafts

    def _pass(self, parts: nn.ModuleDict, ids: Tensor, previous: Tensor) -> Tensor:
        both = (parts["token"](self._embedding(ids)[0]), parts["hidden"](previous))
        x = parts["product"](torch.cat(both, -1))[None]
        positions = torch.arange(ids.shape[1])[None]
        distance = positions.T - positions
        is_hidden = (distance < 0) | (distance >= (self._form.window or len(distance)))
        mask = torch.zeros(distance.shape, dtype=x.dtype).masked_fill(is_hidden, -torch.inf)[None, None]
        angles = self._decoder.rotary_emb(x, positions, *self._form.rope_type)
        out = parts["layer"](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out)[0]


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's weights by themselves."""
    found = dict(tensors)
    if "mlp.experts.gate_up_proj" in found:
        gates_and_ups, downs = found.pop("mlp.experts.gate_up_proj"), found.pop("mlp.experts.down_proj")
        for i, (both, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
            gate, up = both.chunk(2)
            for name, value in (("gate", gate), ("up", up), ("down", down)):
                found[f"mlp.experts.{i}.{name}_proj.weight"] = value
    return found
