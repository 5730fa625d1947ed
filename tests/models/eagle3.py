"""EAGLE-3 drafts of tiny models, beside a plain computation of the same drafts."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.models.cases import SMALL, VOCABULARY
from tests.models.saved import Saved

IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Case:
    model: str
    ids: tuple[int, ...] = ()
    places: tuple[int, ...] = (2, 1, 0)
    """Behind how many layers the states stand that a file with these ids means."""
    hidden_size: int = 48
    vocabulary: int = VOCABULARY
    """Of the draft, which has an embedding and a head of its own where it is smaller."""
    is_normed_residual: bool = False
    prefix: str = ""
    """Of names in the file."""


CASES = {
    "of its own": Case("llama", vocabulary=40, hidden_size=32, is_normed_residual=True),
    "of the model": Case("deepseek-v3", ids=(1, 0, 0), places=(2, 1, 1), prefix="model."),
    "of scaled states": Case("gemma3", ids=(3, 2, 0), places=(3, 2, 0), vocabulary=40),
    "of shared keys": Case("gemma4", places=(2, 2, 1), vocabulary=40),
    "beside recurrent state": Case("qwen3-next", ids=(1, 2), places=(2, 3), vocabulary=40, is_normed_residual=True),
}


class Eagle:
    """The draft as its paper has it, made of modules of `transformers`, saved in a directory of its own."""

    def __init__(self, case: Case, saved: Saved, path: Path) -> None:
        torch.manual_seed(7)
        self.saved, self.path, self._places = saved, path, case.places
        self._is_normed = case.is_normed_residual
        size = case.hidden_size
        config = LlamaConfig(
            **SMALL
            | {"hidden_size": size, "num_hidden_layers": 1, "attn_implementation": "eager", "rope_theta": 5000.0}
        )
        self._rotary = LlamaRotaryEmbedding(config)
        self._layer = LlamaDecoderLayer(config, 0).eval()
        for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
            setattr(self._layer.self_attn, name, nn.Linear(2 * size, heads * 16, bias=False))
        of_target = saved.model.config.hidden_size
        self._fc = nn.Linear(len(case.places) * of_target, size, bias=False)
        norms = {key: nn.RMSNorm(size, config.rms_norm_eps) for key in ("hidden", "last")}
        self._norms = nn.ModuleDict(norms)
        model = saved.model
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        self._is_own = case.vocabulary < VOCABULARY
        own = nn.ModuleList([nn.Embedding(VOCABULARY, size), nn.Linear(size, case.vocabulary, bias=False)])
        with torch.no_grad():
            for parameter in (x for part in (self._layer, self._fc, self._norms, own) for x in part.parameters()):
                parameter.normal_(std=0.15 if parameter.dim() > 1 else 0.3)
                if parameter.dim() == 1:
                    parameter.add_(1)
        self._embedding, self._head = (own[0].weight, own[1].weight) if self._is_own else (embedding, head)
        self._tokens = torch.randperm(VOCABULARY)[: case.vocabulary].sort().values
        if not self._is_own:
            self._tokens = torch.arange(VOCABULARY)
        self._save(case, config)

    def _save(self, case: Case, config: LlamaConfig) -> None:
        tensors = {f"{case.prefix}midlayer.{key}": value for key, value in self._layer.state_dict().items()}
        tensors[f"{case.prefix}midlayer.hidden_norm.weight"] = self._norms["hidden"].weight
        tensors |= {f"{case.prefix}norm.weight": self._norms["last"].weight, f"{case.prefix}fc.weight": self._fc.weight}
        if self._is_own:
            known = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, self._tokens, True)
            tensors |= {"embed_tokens.weight": self._embedding, "lm_head.weight": self._head, "t2d": known}
            tensors["d2t"] = self._tokens - torch.arange(len(self._tokens))
        save_file({key: value.detach().clone() for key, value in tensors.items()}, self.path / "model.safetensors")
        said = config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(self._tokens),
            "target_hidden_size": self.saved.model.config.hidden_size, "norm_before_residual": case.is_normed_residual,
            "eagle_config": {"use_aux_hidden_state": True, IDS: list(case.ids) or None},
        }  # fmt: skip
        (self.path / "config.json").write_text(json.dumps(said))

    @torch.no_grad()
    def drafts(self, text: list[int], length: int, num: int) -> list[int]:
        """Greedy ones behind the first so many tokens of the text."""
        tokens = text[:length]
        states = self._fc(self._of_layers(torch.tensor([tokens])))
        previous = torch.cat((torch.zeros_like(states[:1]), states[:-1]))
        found: list[int] = []
        for _ in range(num):
            states = self._pass(torch.tensor([*tokens, *found]), previous)
            best = (self._norms["last"](states[-1]) @ self._head.T).argmax()
            found.append(int(self._tokens[best]))
            previous = torch.cat((previous, states[-1:]))
        return found

    def _of_layers(self, ids: Tensor) -> Tensor:
        """[T, places × hidden of the model]"""
        decoder = self.saved.model.model
        left = [decoder.embed_tokens(ids)]

        def note(layer: nn.Module, given: object, output: Tensor | tuple[Tensor, ...]) -> None:
            left.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_hook(note) for layer in decoder.layers]
        decoder(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat([left[place][0] for place in self._places], -1).float()

    def _pass(self, ids: Tensor, previous: Tensor) -> Tensor:
        layer, positions = self._layer, torch.arange(len(ids))[None]
        state = self._norms["hidden"](previous)
        both = torch.cat((layer.input_layernorm(self._embedding[ids]), state), -1)[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        mixed = layer.self_attn(both, position_embeddings=self._rotary(both, positions), attention_mask=mask)[0][0]
        stream = (state if self._is_normed else previous) + mixed
        return stream + layer.mlp(layer.post_attention_layernorm(stream))
