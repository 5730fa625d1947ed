"""A draft model beside the one that is served: the tokens of a run without, and a cache that is right at every place.

The draft that is the model itself shows the second: in float32 it proposes what the model says, so all of it is right.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MAX_MODEL_LEN, NUM_TOKENS, PROMPTS, TinyModel
from tests.engine.loop import Loop, make_sequence
from tests.engine.mix import MIX
from tests.engine.ranks import Ranks
from tests.fakes.graphs import RecordedGraphs
from tests.runner.conftest import save_llama
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.model_drafter import ModelDrafter
from worker.core.params import BeamParams
from worker.executor.executor import Executor
from worker.loader.errors import ModelConfigError
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import ModelInfo, RunnerConfig
from worker.runner.graphs import GraphSizes
from worker.runner.model_runner import ModelRunner

OPTIONS = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 256}


class Drafted:
    """Runners over the tiny model and a draft model, made once."""

    def __init__(self, tiny: TinyModel, stranger: Path) -> None:
        self.tiny, self.stranger = tiny, stranger
        self.runner = cache(self._runner)

    def config(self, draft_model: Path, **options: object) -> RunnerConfig:
        defaults = {"num_blocks": 64, "swap_space_gib": 0.01, "num_speculative_tokens": 4, **OPTIONS}
        return RunnerConfig(
            model=str(self.tiny.path),
            device="cpu",
            drafter="draft",
            draft_model=str(draft_model),
            **(defaults | options),
        )

    def _runner(self, draft_model: Path, **options: object) -> tuple[ModelRunner, ModelInfo]:
        return build_runner(self.config(draft_model, **options), Group())

    def loop(self, draft_model: Path, cached_tokens: int = 1024, prefix: str = "off", **scheduler) -> Loop:
        runner, info = self.runner(draft_model)
        return make_loop(runner, cached_tokens // info.block_size, prefix, **scheduler)


def make_loop(runner: object, num_blocks: int, prefix: str = "off", **scheduler) -> Loop:
    num_host_blocks = 32 if scheduler.get("preemption_mode") == "swap" else 0
    options = {"async_depth": 0, "num_speculative_tokens": 4, "watermark": 0.0, **OPTIONS}
    return Loop(
        runner,
        SchedulerConfig(**(options | scheduler)),
        CacheConfig(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=prefix != "off",
            prefix_index="hash" if prefix == "off" else prefix,
        ),
        ModelDrafter(),
    )


@pytest.fixture(scope="module")
def drafted(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """The stranger has other layers and heads than the model, and nothing in common with it but the vocabulary."""
    path = tmp_path_factory.mktemp("stranger")
    save_llama(path, num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    return Drafted(tiny, path)


def greedy_prompts() -> list:
    return [make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)]


def in_order(loop: Loop) -> list[list[int]]:
    return [loop.tokens[i] for i in range(len(PROMPTS))]


def test_what_is_always_right_saves_as_many_steps_as_it_drafts(drafted):
    loop = drafted.loop(drafted.tiny.path)
    loop.run(make_sequence(0, PROMPTS[2], NUM_TOKENS))
    assert loop.tokens[0] == drafted.tiny.references[2]
    load = loop.scheduler.load()
    # The prompt's step, three of five tokens, and one that has places for three drafts before the last token.
    assert load.num_steps == 5
    assert load.accepted_counts == (0, 0, 0, 1, 3)


@pytest.mark.parametrize(
    ("cached_tokens", "prefix", "scheduler"),
    [
        (1024, "off", {}),
        (1024, "hash", {"scheduling_policy": "chunked", "max_prefill_chunk": 7}),
        (144, "radix", {"scheduling_policy": "chunked", "max_prefill_chunk": 7}),
        (144, "off", {"preemption_mode": "swap"}),
        (144, "hash", {"num_speculative_tokens": 2}),
    ],
)
def test_its_cache_is_right_whatever_becomes_of_the_blocks(drafted, cached_tokens, prefix, scheduler):
    """Prompts in chunks, prefixes found, sequences preempted and swapped: not one draft is wrong."""
    loop = drafted.loop(drafted.tiny.path, cached_tokens, prefix, **scheduler)
    loop.run(*greedy_prompts(), each_step=1)
    assert in_order(loop) == drafted.tiny.references
    load = loop.scheduler.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 50
    assert (load.num_preemptions > 0) == (cached_tokens < 1024)
    assert (load.num_prefix_hits > 0) == (prefix != "off")


def test_drawn_drafts_agree_by_the_noise_that_they_share(drafted):
    """Any rules of sampling: what a draft is drawn by is what the model draws by."""
    plain, loop = drafted.tiny.loop(16), drafted.loop(drafted.tiny.path)
    for each in (plain, loop):
        each.run(*(make_sequence(i, PROMPTS[i], NUM_TOKENS, sampling) for i, sampling in enumerate(MIX)))
    assert loop.tokens == plain.tokens
    load = loop.scheduler.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 50


@pytest.mark.parametrize("sampling", [None, MIX])
def test_a_stranger_is_wrong_and_changes_nothing(drafted, sampling):
    rules = sampling or [MIX[0]] * len(MIX)
    plain, loop = drafted.tiny.loop(16), drafted.loop(drafted.stranger, 144)
    for each in (plain, loop):
        each.run(*(make_sequence(i, PROMPTS[i], NUM_TOKENS, params) for i, params in enumerate(rules)))
    assert loop.tokens == plain.tokens
    load = loop.scheduler.load()
    assert load.num_preemptions > 0 and load.num_accepted_tokens < load.num_draft_tokens / 2


def test_beams_beside_it_are_not_drafted(drafted):
    plain, loop = drafted.tiny.loop(16), drafted.loop(drafted.tiny.path)
    for each in (plain, loop):
        beam = make_sequence(9, PROMPTS[4], NUM_TOKENS, beam=BeamParams(width=3, length_penalty=1.0))
        each.run(beam, *greedy_prompts())
    assert [h.token_ids for h in loop.ended[9].hypotheses] == [h.token_ids for h in plain.ended[9].hypotheses]
    assert in_order(loop) == drafted.tiny.references
    load = loop.scheduler.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 0


def test_replayed_graphs_draft_alike(drafted):
    runner, info = build_runner(drafted.config(drafted.tiny.path, kernel_backend="torch"), Group())
    graphs = RecordedGraphs()
    with torch.inference_mode():
        runner.capture(GraphSizes(tokens=(8, 64)), graphs)
    loop = make_loop(runner, info.num_blocks)
    loop.run(*greedy_prompts()[:4])
    assert [loop.tokens[i] for i in range(4)] == drafted.tiny.references[:4]
    load = loop.scheduler.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 0
    of_draft = graphs.graphs[len(graphs.graphs) // 2 :]
    assert len(of_draft) == 2 * (3 + 1) and all(graph.num_replays for graph in of_draft)


def test_two_ranks_draft_alike(drafted):
    """Each has its part of the draft model, and takes over what rank 0 proposes."""
    options = {"tensor_parallel_size": 2, "num_threads": 1, "num_blocks": 9}
    executor = Executor(drafted.config(drafted.tiny.path, **options), log_level="warning")
    executor.start(120)
    try:
        loop = make_loop(Ranks(executor), 9)
        loop.run(*greedy_prompts())
    finally:
        executor.shutdown()
    assert in_order(loop) == drafted.tiny.references
    load = loop.scheduler.load()
    assert load.num_preemptions > 0 and load.num_accepted_tokens == load.num_draft_tokens > 0


def test_its_part_of_a_block_is_counted(drafted):
    plain = build_runner(RunnerConfig(model=str(drafted.tiny.path), device="cpu", num_blocks=64, **OPTIONS), Group())[1]
    _, same = drafted.runner(drafted.tiny.path)
    assert same.memory.kv_cache == 2 * plain.memory.kv_cache
    assert same.memory.weights == 2 * plain.memory.weights
    _, half = drafted.runner(drafted.tiny.path, num_blocks=None, kv_cache_gib=plain.memory.kv_cache / 2**30)
    assert half.num_blocks == 32


def test_what_cannot_draft_is_refused_by_name(drafted, tmp_path):
    other = tmp_path / "other"
    save_llama(other, vocab_size=96, num_hidden_layers=1)
    with pytest.raises(ModelConfigError, match=r"draft model .*other: its vocab_size is 96, .* drafts for 131"):
        drafted.runner(other)
    with pytest.raises(ModelConfigError, match=r"draft model \S+nowhere: no model"):
        drafted.runner(tmp_path / "nowhere")
