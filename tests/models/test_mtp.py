"""Drafts of a model's own layer for multi-token prediction are those of a plain computation over the whole sequence."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from tests.engine.loop import Loop, make_sequence
from tests.engine.mix import MIX
from tests.fakes.graphs import RecordedGraphs
from tests.models.cases import VOCABULARY, all_cases
from tests.models.cases.deepseek import EXPERTS, LATENT
from tests.models.saved import Saved, save
from tests.runner.conftest import random_prompt
from worker.core.batch import ScheduledBatch
from worker.core.cache.pools import PoolKind
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.model_drafter import ModelDrafter
from worker.core.sequence import Sequence
from worker.loader.errors import ModelConfigError, WeightsError
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig
from worker.runner.graphs import GraphSizes
from worker.runner.model_runner import ModelRunner

LAYERS = {
    "deepseek-v3": DeepseekV3DecoderLayer,
    "deepseek-v32": DeepseekV32DecoderLayer,
    "glm4-moe": Glm4MoeDecoderLayer,
    "qwen3-next": Qwen3NextDecoderLayer,
}
OF_QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "head": "norm"}
NUM_TOKENS, NUM_DRAFTS = 14, 3
PROMPTS = [random_prompt(length, length, VOCABULARY) for length in (1, 5, 17, 40)]
OPTIONS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 128}


class Mtp:
    """The layer as the paper has it, made of modules of `transformers`, saved beside the model's own."""

    def __init__(self, saved: Saved, name: str) -> None:
        torch.manual_seed(7)
        self.saved = saved
        self._model: PreTrainedModel = saved.model
        config = self._model.config
        size = config.hidden_size
        self._is_qwen = name == "qwen3-next"
        norm = Qwen3NextRMSNorm if self._is_qwen else nn.RMSNorm
        # Some configs have a list of what each layer is.
        number = config.num_hidden_layers - (name in ("deepseek-v32", "qwen3-next"))
        self._layer = LAYERS[name](config, number).eval()
        self._eh_proj = nn.Linear(2 * size, size, bias=False)
        self._norms = nn.ModuleDict({key: norm(size, eps=config.rms_norm_eps) for key in OF_QWEN})
        with torch.no_grad():
            for parameter in (*self._layer.parameters(), *self._eh_proj.parameters(), *self._norms.parameters()):
                parameter.normal_(std=0.15 if parameter.dim() > 1 else 0.3)
                if parameter.dim() == 1 and not self._is_qwen:
                    parameter.add_(1)
        file = saved.path / "model.safetensors"
        stored = load_file(file)
        tensors = self._named(stored, f"model.layers.{config.num_hidden_layers}.")
        save_file(stored | {key: value.detach().clone() for key, value in tensors.items()}, file)
        for module in (self._layer, self._eh_proj, self._norms):
            module.to(self._model.dtype)

    def _named(self, stored: dict[str, Tensor], first: str) -> dict[str, Tensor]:
        """As the checkpoint has them. DeepSeek's begin with `first`, and copies of embedding and head among them."""
        layer = _apart(self._layer.state_dict())
        if self._is_qwen:
            found = {f"mtp.layers.0.{key}": value for key, value in layer.items()}
            found |= {f"mtp.{OF_QWEN[key]}.weight": norm.weight for key, norm in self._norms.items()}
            return found | {"mtp.fc.weight": self._eh_proj.weight}
        layer |= {"eh_proj.weight": self._eh_proj.weight, "shared_head.norm.weight": self._norms["head"].weight}
        layer |= {f"{key}.weight": self._norms[key].weight for key in ("enorm", "hnorm")}
        layer["embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        layer["shared_head.head.weight"] = stored["lm_head.weight"]
        return {first + key: value for key, value in layer.items()}

    @torch.no_grad()
    def drafts(self, tokens: list[int], num: int) -> list[int]:
        """Greedy ones behind `tokens`."""
        ids = torch.tensor([tokens])
        hidden = self._model.model(ids, use_cache=False).last_hidden_state[0]
        previous = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
        found: list[int] = []
        for _ in range(num):
            ids = torch.tensor([[*tokens, *found]])
            state = self._pass(ids, previous)[-1:]
            normed = self._norms["head"](state)
            found.append(int(self._model.lm_head(normed).argmax()))
            previous = torch.cat((previous, normed if self._is_qwen else state))
        return found

    def _pass(self, ids: Tensor, previous: Tensor) -> Tensor:
        both = (self._norms["enorm"](self._model.model.embed_tokens(ids)[0]), self._norms["hnorm"](previous))
        x = self._eh_proj(torch.cat(both, -1))[None]
        positions = torch.arange(ids.shape[1])[None]
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        out = self._layer(
            x, attention_mask=mask, position_ids=positions,
            position_embeddings=self._model.model.rotary_emb(x, positions),
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out)[0]


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's weights by themselves, as checkpoints have them."""
    found = dict(tensors)
    if "mlp.experts.gate_up_proj" in found:
        gates_and_ups, downs = found.pop("mlp.experts.gate_up_proj"), found.pop("mlp.experts.down_proj")
        for i, (both, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
            gate, up = both.chunk(2)
            for name, value in (("gate", gate), ("up", up), ("down", down)):
                found[f"mlp.experts.{i}.{name}_proj.weight"] = value
    return found


@pytest.fixture(scope="module", params=list(LAYERS))
def mtp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mtp:
    return Mtp(save(all_cases()[request.param], tmp_path_factory.mktemp("mtp")), request.param)


@pytest.fixture(scope="module")
def runner(mtp: Mtp) -> ModelRunner:
    return make_runner(mtp.saved.path)


def make_runner(path: Path, **options: object) -> ModelRunner:
    defaults = {"num_blocks": 64, "has_mtp_drafts": True, "num_speculative_tokens": NUM_DRAFTS, **OPTIONS}
    return build_runner(RunnerConfig(model=str(path), device="cpu", **(defaults | options)), Group())[0]


def has_state(runner: ModelRunner) -> bool:
    return any(entry.kind is PoolKind.STATE for builder in runner._parts.builders for entry in builder.entry_tensors())


def make_loop(runner: ModelRunner, num_blocks: int = 64, drafter: object = None, **scheduler) -> Loop:
    options = {"async_depth": 0, "num_speculative_tokens": NUM_DRAFTS if drafter else 0, "watermark": 0.0, **OPTIONS}
    num_groups = OPTIONS["max_num_seqs"] if has_state(runner) else 0
    cache = CacheConfig(num_blocks=num_blocks, num_groups=num_groups, enable_prefix_caching=False)
    return Loop(runner, SchedulerConfig(**(options | scheduler)), cache, drafter)


class Watch:
    """Compares what is proposed with the plain computation, then puts in place of it what the model will say, up to
    some token that is wrong: rows go on after any number of drafts that were right."""

    def __init__(self, mtp: Mtp, runner: ModelRunner, texts: list[list[int]]) -> None:
        self._mtp, self._texts, self._random = mtp, texts, random.Random(1)
        self._drafting, self._tokens = runner._parts.drafting, runner._parts.slots.tables.tokens
        self._propose = self._drafting.propose
        self.num_compared = 0

    def propose(self, batch: ScheduledBatch) -> None:
        self._propose(batch)
        for row, num in batch.num_draft_tokens.items():
            length, tokens = batch.num_computed_tokens[row] + 1, self._tokens[batch.slots[row]]
            (text,) = (text for text in self._texts if text[:length] == tokens[:length].tolist())
            assert tokens[length : length + num].tolist() == self._mtp.drafts(text[:length], num)
            self.num_compared += num
            tokens[length : length + num] = torch.tensor(text[length : length + num])
            if self._random.random() < 0.5:
                tokens[length + self._random.randrange(num)] += 1


@pytest.mark.parametrize(("policy", "chunk"), [("prefill_first", 0), ("chunked", 7)])
def test_they_are_those_of_the_whole_sequence(
    mtp: Mtp, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, policy: str, chunk: int
) -> None:
    def sequences() -> list[Sequence]:
        return [make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    plain = make_loop(runner).run(*sequences())
    watch = Watch(mtp, runner, [[*prompt, *plain[i]] for i, prompt in enumerate(PROMPTS)])
    monkeypatch.setattr(runner._parts.drafting, "propose", watch.propose)
    loop = make_loop(runner, drafter=ModelDrafter(), scheduling_policy=policy, max_prefill_chunk=chunk)
    assert loop.run(*sequences(), each_step=1) == plain
    for i, prompt in enumerate(PROMPTS):
        mtp.saved.assert_greedy(prompt, plain[i])
    assert all(loop.scheduler.load().accepted_counts) and watch.num_compared > 40


@pytest.mark.parametrize("mtp", ["deepseek-v3", "glm4-moe", "qwen3-next"], indirect=True)
def test_no_token_is_another_by_them(mtp: Mtp, runner: ModelRunner) -> None:
    """By any rules, and where some are preempted. Not of V3.2: which of keys of equal scores its index takes goes by
    the shape of a product, in chunks of a prompt, too."""
    plain, loop = make_loop(runner), make_loop(runner, 10, ModelDrafter())
    for each in (plain, loop):
        each.run(*(make_sequence(i, PROMPTS[i % 4], NUM_TOKENS, params) for i, params in enumerate(MIX)))
    assert loop.tokens == plain.tokens
    load = loop.scheduler.load()
    assert load.num_preemptions > 0 and load.num_draft_tokens > 20


@pytest.mark.parametrize("mtp", ["deepseek-v3"], indirect=True)
def test_what_has_no_such_layer_is_refused(mtp: Mtp, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(mtp.saved.path / "config.json")
    number = json.loads((mtp.saved.path / "config.json").read_text())["num_hidden_layers"]
    tensors = load_file(mtp.saved.path / "model.safetensors")
    own = {key: value for key, value in tensors.items() if not key.startswith(f"model.layers.{number}.")}
    save_file(own, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing: layer\.eh_proj"):
        make_runner(tmp_path)
    with pytest.raises(ModelConfigError, match="LlamaForCausalLM has no layer for multi-token prediction"):
        make_runner(Path("smollm2"))


def test_between_replayed_graphs_of_the_model_it_runs_as_ever(tmp_path: Path) -> None:
    """With the model's logits waiting in memory that graphs share. The model has no experts, whose work in torch
    depends on what is in its tensors."""
    saved = save(
        lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT | EXPERTS | {"first_k_dense_replace": 2})), tmp_path
    )
    Mtp(saved, "deepseek-v3")
    runner = make_runner(tmp_path, kernel_backend="torch")
    graphs = RecordedGraphs()
    with torch.inference_mode():
        runner.capture(GraphSizes(tokens=(8, 64)), graphs)
    loop = make_loop(runner, drafter=ModelDrafter())
    loop.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        saved.assert_greedy(prompt, loop.tokens[i])
    assert sum(graph.num_replays for graph in graphs.graphs) > 0
