"""EAGLE-3 drafts are those of a plain computation over the whole sequence, of any model that is a decoder of ours."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.loop import make_sequence
from tests.engine.mix import MIX
from tests.fakes.graphs import RecordedGraphs
from tests.models.cases import all_cases
from tests.models.draft_rig import (
    NUM_TOKENS,
    PROMPTS,
    Built,
    Watch,
    assert_two_ranks_propose_alike,
    build,
    make_loop,
)
from tests.models.eagle3 import CASES, IDS, Eagle
from tests.models.saved import save
from worker.core.model_drafter import ModelDrafter
from worker.core.sequence import Sequence
from worker.loader.decoder_fields import read_decoder
from worker.loader.errors import ModelConfigError
from worker.loader.families.eagle3 import eagle3_config
from worker.loader.fields import Fields
from worker.runner.graphs import GraphSizes


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
