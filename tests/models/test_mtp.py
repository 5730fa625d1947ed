"""Drafts of layers for multi-token prediction are those of a plain computation over the whole sequence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.engine.loop import make_sequence
from tests.engine.mix import MIX
from tests.fakes.graphs import RecordedGraphs
from tests.models.cases import all_cases
from tests.models.cases.deepseek import EXPERTS, LATENT
from tests.models.draft_rig import NUM_TOKENS, PROMPTS, Built, Watch, assert_two_ranks_propose_alike, build, make_loop
from tests.models.mtp import FORMS, Mtp
from tests.models.saved import save
from worker.core.model_drafter import ModelDrafter
from worker.core.sequence import Sequence
from worker.loader.errors import ModelConfigError, WeightsError
from worker.runner.graphs import GraphSizes


@pytest.fixture(scope="module", params=list(FORMS))
def mtp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mtp:
    return Mtp(save(all_cases()[request.param], tmp_path_factory.mktemp("mtp")), FORMS[request.param])


@pytest.fixture(scope="module")
def built(mtp: Mtp) -> Built:
    return build(mtp.saved.path)


@pytest.mark.parametrize(("policy", "chunk"), [("prefill_first", 0), ("chunked", 7)])
def test_they_are_those_of_the_whole_sequence(
    mtp: Mtp, built: Built, monkeypatch: pytest.MonkeyPatch, policy: str, chunk: int
) -> None:
    def sequences() -> list[Sequence]:
        return [make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]

    plain = make_loop(built).run(*sequences())
    watch = Watch(mtp, built[0], [[*prompt, *plain[i]] for i, prompt in enumerate(PROMPTS)])
    monkeypatch.setattr(built[0]._parts.drafting, "propose", watch.propose)
    loop = make_loop(built, drafter=ModelDrafter(), scheduling_policy=policy, max_prefill_chunk=chunk)
    assert loop.run(*sequences(), each_step=1) == plain
    for i, prompt in enumerate(PROMPTS):
        mtp.saved.assert_greedy(prompt, plain[i])
    assert all(loop.scheduler.load().accepted_counts) and watch.num_compared > 40


@pytest.mark.parametrize("mtp", ["deepseek-v3", "deepseek-v32", "glm4-moe", "qwen3-next"], indirect=True)
def test_no_token_is_another_by_them(mtp: Mtp, built: Built) -> None:
    """By any rules, and where some are preempted."""
    plain, loop = make_loop(built), make_loop(built, 10, ModelDrafter())
    for each in (plain, loop):
        each.run(*(make_sequence(i, PROMPTS[i % 4], NUM_TOKENS, params) for i, params in enumerate(MIX)))
    assert loop.tokens == plain.tokens
    load = loop.scheduler.load()
    assert load.num_preemptions > 0 and load.num_draft_tokens > 20


@pytest.mark.parametrize("mtp", ["qwen3.5-moe"], indirect=True)
def test_two_ranks_propose_the_same(mtp: Mtp, built: Built) -> None:
    assert_two_ranks_propose_alike(built, (3, 11, 40, 77), mtp.saved.path)


@pytest.mark.parametrize("mtp", ["mimo-v2-flash"], indirect=True)
def test_layers_whose_turn_never_comes_are_left_out(mtp: Mtp, built: Built) -> None:
    one, all_of_them = build(mtp.saved.path, num_speculative_tokens=1), built
    heads = [runner._parts.drafting.draft.model for runner, _ in (one, all_of_them)]
    assert [len(head.layers) for head in heads] == [1, 2]
    assert one[1].memory.kv_cache < all_of_them[1].memory.kv_cache


@pytest.mark.parametrize("mtp", ["deepseek-v3", "qwen3-next"], indirect=True)
def test_what_has_no_such_layer_is_refused(mtp: Mtp, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(mtp.saved.path / "config.json")
    tensors = load_file(mtp.saved.path / "model.safetensors")
    own = {key: value for key, value in tensors.items() if not key.startswith(mtp.prefixes[0])}
    save_file(own, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"\d+ missing: {mtp.prefixes[0]}(eh_proj|fc)\.weight, "):
        build(tmp_path)
    with pytest.raises(ModelConfigError, match="LlamaForCausalLM has no layer for multi-token prediction"):
        build(Path("smollm2"))


def test_between_replayed_graphs_of_the_model_it_runs_as_ever(tmp_path: Path) -> None:
    """With the model's logits waiting in memory that graphs share. The model has no experts, whose work in torch
    depends on what is in its tensors."""
    saved = save(
        lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT | EXPERTS | {"first_k_dense_replace": 2})), tmp_path
    )
    Mtp(saved, FORMS["deepseek-v3"])
    built = build(tmp_path, kernel_backend="torch")
    graphs = RecordedGraphs()
    with torch.inference_mode():
        built[0].capture(GraphSizes(tokens=(8, 64)), graphs)
    loop = make_loop(built, drafter=ModelDrafter())
    loop.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        saved.assert_greedy(prompt, loop.tokens[i])
    assert sum(graph.num_replays for graph in graphs.graphs) > 0
