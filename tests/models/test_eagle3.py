"""EAGLE-3 drafts are those of a plain computation over the whole sequence, of any model that is a decoder of ours."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.engine.loop import make_sequence
from tests.engine.mix import MIX
from tests.fakes.graphs import RecordedGraphs
from tests.models.cases import SMALL, VOCABULARY, all_cases
from tests.models.saved import Saved, save
from tests.models.test_mtp import (
    NUM_TOKENS,
    PROMPTS,
    Built,
    Watch,
    assert_two_ranks_propose_alike,
    build,
    make_loop,
)
from worker.core.model_drafter import ModelDrafter
from worker.core.sequence import Sequence
from worker.loader.decoder_fields import read_decoder
from worker.loader.errors import ModelConfigError
from worker.loader.families.eagle3 import eagle3_config
from worker.loader.fields import Fields
from worker.runner.graphs import GraphSizes

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


def make_eagle(name: str, tmp_path_factory: pytest.TempPathFactory) -> Eagle:
    case = CASES[name]
    saved = save(all_cases()[case.model], tmp_path_factory.mktemp("model"))
    return Eagle(case, saved, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module", params=list(CASES))
def eagle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eagle:
    return make_eagle(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def built(eagle: Eagle) -> Built:
    return make(eagle)


def options(eagle: Eagle) -> dict[str, object]:
    return {"drafter": "eagle3", "draft_model": str(eagle.path)}


def make(eagle: Eagle, **more: object) -> Built:
    return build(eagle.saved.path, **options(eagle) | more)


def sequences() -> list[Sequence]:
    return [make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(("policy", "chunk"), [("prefill_first", 0), ("chunked", 7)])
def test_they_are_those_of_the_whole_sequence(
    eagle: Eagle, built: Built, monkeypatch: pytest.MonkeyPatch, policy: str, chunk: int
) -> None:
    plain = make_loop(built).run(*sequences())
    watch = Watch(eagle, built[0], [[*prompt, *plain[i]] for i, prompt in enumerate(PROMPTS)])
    monkeypatch.setattr(built[0]._parts.drafting, "propose", watch.propose)
    loop = make_loop(built, drafter=ModelDrafter(), scheduling_policy=policy, max_prefill_chunk=chunk)
    assert loop.run(*sequences(), each_step=1) == plain
    for i, prompt in enumerate(PROMPTS):
        eagle.saved.assert_greedy(prompt, plain[i])
    assert all(loop.scheduler.load().accepted_counts) and watch.num_compared > 40


@pytest.mark.parametrize("eagle", ["of its own"], indirect=True)
def test_no_token_is_another_by_them(eagle: Eagle, built: Built) -> None:
    """By any rules, where some are preempted, and where the prefixes of some are found."""
    plain, loop, short = (make_loop(built, *more) for more in ((), (64, ModelDrafter()), (10, ModelDrafter())))
    for each, rounds in ((plain, 1), (loop, 2), (short, 1)):
        for first in range(0, 10 * rounds, 10):
            each.run(*(make_sequence(first + i, PROMPTS[3 - i % 4], NUM_TOKENS, rules) for i, rules in enumerate(MIX)))
    assert short.tokens == plain.tokens
    assert loop.tokens == plain.tokens | {10 + i: tokens for i, tokens in plain.tokens.items()}
    loads = loop.scheduler.load(), short.scheduler.load()
    assert loads[0].num_prefix_hits > 0 and loads[1].num_preemptions > 0
    assert min(load.num_draft_tokens for load in loads) > 20


@pytest.mark.parametrize("eagle", ["of its own"], indirect=True)
def test_two_ranks_propose_the_same(eagle: Eagle, built: Built) -> None:
    allowed = tuple(eagle._tokens[:4].tolist())
    assert_two_ranks_propose_alike(built, allowed, eagle.saved.path, **options(eagle))


@pytest.mark.parametrize("eagle", ["of its own"], indirect=True)
def test_states_are_kept_by_replayed_graphs_too(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    built, graphs = make(eagle, kernel_backend="torch"), RecordedGraphs()
    with torch.inference_mode():
        built[0].capture(GraphSizes(tokens=(8, 64)), graphs)
    plain = make_loop(built).run(*sequences())
    watch = Watch(eagle, built[0], [[*prompt, *plain[i]] for i, prompt in enumerate(PROMPTS)])
    monkeypatch.setattr(built[0]._parts.drafting, "propose", watch.propose)
    loop = make_loop(built, drafter=ModelDrafter())
    assert loop.run(*sequences(), each_step=1) == plain
    assert watch.num_compared > 40 and sum(graph.num_replays for graph in graphs.graphs) > 0


@pytest.mark.parametrize(
    ("said", "num_layers", "places"),
    [
        ({"eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True}}, 61, (2, 30, 58)),
        ({"eagle_config": {IDS: [1, 29, 57]}, "head_dim": None}, 61, (2, 30, 58)),
        ({"eagle_config": {IDS: [1, 29, 61]}, "additional_fc": False}, 62, (2, 30, 62)),
        ({"target_model_type": "gemma3_text", "reuse_target_lm_head": True, "sliding_window": 512}, 62, (2, 31, 59)),
        ({IDS: [24, 30, 36]}, 36, (24, 30, 36)),
    ],
)
def test_published_files_are_read(said: dict[str, object], num_layers: int, places: tuple[int, ...]) -> None:
    """As those for Kimi-K2.5, DeepSeek-V3, Gemma 3 and GPT-OSS are written."""
    config = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 1, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "sliding_window": None, "max_window_layers": 48,
        "use_sliding_window": False, "pretraining_tp": 1, "vocab_size": 163840, "draft_vocab_size": 32000,
        "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True,
    }  # fmt: skip
    eagle = read_decoder(Fields(config | said, "config.json"), eagle3_config)
    assert (eagle.draft_vocab_size, eagle.target_hidden_size, eagle.places(num_layers)) == (32000, 7168, places)


@pytest.mark.parametrize("eagle", ["of its own"], indirect=True)
@pytest.mark.parametrize(
    ("said", "tensors", "message"),
    [
        ({"vocab_size": 98}, {}, "its vocab_size is 98, that of the model it drafts for 99"),
        ({"target_hidden_size": 64}, {}, "hidden_size of 64, that of the model it drafts for is 48"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "its architecture is LlamaForCausalLM; LlamaForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2; nothing but 1"),
        ({"eagle_config": {IDS: [0, 1, 4]}}, {}, "states behind 0, 1, 4 layers.* has 3"),
        ({"fc_norm": True}, {}, "fc_norm is True; fields that are not known"),
        ({"eagle_config": {"use_other": 1}}, {}, "eagle_config.use_other is 1; fields that are not known"),
        ({}, {"d2t": None}, "tensor d2t is missing: draft_vocab_size is 40, vocab_size 99"),
        ({}, {"d2t": torch.zeros(40, dtype=torch.int64) + 60}, "tensor d2t names token 60 to 99 of 99"),
        ({}, {"d2t": -torch.arange(40)}, "tensor d2t names a token of the model twice"),
        ({}, {"d2t": torch.zeros(39, dtype=torch.int64)}, r"tensor d2t is torch.int64 of shape \(39,\)"),
        ({}, {"lm_head.weight": None}, "it has no lm_head, and its hidden_size is 32, .* 48"),
        ({}, {"embed_tokens.weight": None}, "it has no embed_tokens, and its hidden_size is 32, .* 48"),
        ({}, {"fc.weight": torch.zeros(32, 96)}, r"tensor fc.weight: its shape is \(32, 96\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    eagle: Eagle, tmp_path: Path, said: dict[str, object], tensors: dict[str, Tensor | None], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((eagle.path / "config.json").read_text()) | said))
    stored = load_file(eagle.path / "model.safetensors") | tensors
    save_file({key: value for key, value in stored.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelConfigError, match=f"draft model .*{message}"):
        make(eagle, draft_model=str(tmp_path))


@pytest.mark.parametrize("eagle", ["of its own"], indirect=True)
def test_a_model_of_transformers_keeps_no_states(eagle: Eagle) -> None:
    with pytest.raises(ModelConfigError, match="is computed by `transformers`, which keeps no states of layers"):
        make(eagle, model_impl="transformers")
