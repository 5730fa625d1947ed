"""A new kind of attention is one file, and this is one: a recurrent layer, whose state is a decaying sum of its inputs.

Its state is a group of two entries a request (the sum; the number of tokens). Beside it stands ordinary attention, so
both kinds of pool are there. Scheduler, runner and mover know nothing of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.loop import Loop, make_sequence
from worker.attention.context import current_context
from worker.attention.interface import CacheBuilder, CacheLayer, EntryTensor, make_builders
from worker.core.cache.pools import PoolKind, PoolPlan, PoolSpec
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.errors import ConfigError
from worker.kernels.select import Kernels
from worker.kernels.step import Step, StepBuffers
from worker.layers.blocks import AttentionShape, DecoderLayer, GatedMLP, SelfAttention
from worker.layers.decoder import Decoder
from worker.layers.embedding import OutputHead
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.models.base import CausalLM
from worker.models.weights import fill_with_noise, pack_weights
from worker.parallel.group import Group
from worker.runner.assembly import Assembly
from worker.runner.config import RunnerConfig
from worker.runner.model_runner import ModelRunner

HIDDEN, VOCABULARY, BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 32, 67, 16, 96, 8
NUM_CHECKPOINTS = 3
DECAY = 0.8


# --- the new kind


@dataclass(frozen=True, slots=True)
class DecaySpec:
    size: int

    def make_builder(self, layers: Sequence[Any], number: int, kernels: Kernels, block_size: int) -> CacheBuilder:
        return DecayBuilder(self, layers, number)


class Decay(CacheLayer):
    def __init__(self, size: int) -> None:
        super().__init__(DecaySpec(size), size)
        self.number, self.state = 0, torch.empty(0)

    def attend(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for group, start, end in current_context().metadata[self.number]:
            total, count = self.state[2 * group], self.state[2 * group + 1]
            for token in range(start, end):
                total.mul_(DECAY).add_(x[token])
                out[token] = total
            count += end - start
        return out


class DecayMixer(nn.Module):
    """In place of a `SelfAttention`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.decay = Decay(size)

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x, residual = norm.add_norm(x, residual)
        out = self.decay(x)
        return (out, residual) if wanted is None else (out.index_select(0, wanted), residual.index_select(0, wanted))


class DecayBuilder:
    def __init__(self, spec: DecaySpec, layers: Sequence[Decay], number: int) -> None:
        self.spec, self.layers, self.number = spec, layers, number
        self.states: list[Tensor] = []

    def pool_specs(self) -> list[PoolSpec]:
        return [PoolSpec(PoolKind.STATE, 4 * self.spec.size * len(self.layers), entries_per_request=2)]

    def allocate(self, plan: PoolPlan) -> None:
        # Garbage: whoever gets a group must find it cleared.
        self.states = [torch.full((2 * (plan.num_groups + 1), self.spec.size), 7.0) for _ in self.layers]
        for layer, state in zip(self.layers, self.states, strict=True):
            layer.number, layer.state = self.number, state

    def entry_tensors(self) -> list[EntryTensor]:
        return [EntryTensor(PoolKind.STATE, state, entries_per_request=2) for state in self.states]

    def graph_contexts(self, num_rows: int, max_context_len: int) -> tuple[int, ...]:
        return ()

    def all_steps(self, max_rows: int, max_tokens: int, max_context_len: int) -> Iterable[Step]:
        return ()

    def prepare(self, step: Step, buffers: StepBuffers) -> list[tuple[int, int, int]]:
        starts = buffers.query_starts[: step.num_rows + 1].tolist()
        return list(zip(buffers.groups[: step.num_rows].tolist(), starts[:-1], starts[1:], strict=True))


# --- a model with it


class Hybrid(CausalLM):
    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        self.vocab_size = VOCABULARY
        shape = AttentionShape(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=8)
        mixers: list[nn.Module] = [DecayMixer(HIDDEN), SelfAttention(setup, shape, None), DecayMixer(HIDDEN)]
        layers = [DecoderLayer(setup, mixer, GatedMLP(setup, HIDDEN, 48), HIDDEN, 1e-5) for mixer in mixers]
        self.model = Decoder(setup, VOCABULARY, HIDDEN, layers, 1e-5)
        self.lm_head = OutputHead(setup, VOCABULARY, HIDDEN)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.lm_head(hidden)


@pytest.fixture(scope="module")
@torch.inference_mode()
def runner() -> ModelRunner:
    kernels = Kernels(torch.device("cpu"))
    model = Hybrid(LayerSetup(kernels, Group(), torch.float32))
    fill_with_noise(model, seed=3)
    for module in model.modules():
        if isinstance(module, OutputHead):
            module.weight.dense.mul_(20)
    pack_weights(model)
    builders = make_builders(model.cache_layers(), kernels, BLOCK_SIZE)
    specs = [spec for builder in builders for spec in builder.pool_specs()]
    assert [spec.kind for spec in specs] == [PoolKind.STATE, PoolKind.PAGE]
    config = RunnerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=64, block_size=BLOCK_SIZE)
    assembly = Assembly(
        config=config, kernels=kernels, tp=Group(), model=model, builders=builders, max_model_len=MAX_MODEL_LEN
    )
    return assembly.runner(PoolPlan.of(specs, 32, MAX_NUM_SEQS, NUM_CHECKPOINTS))


def loop(runner: ModelRunner, num_blocks: int = 32, num_checkpoints: int = 0, **scheduler: Any) -> Loop:
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 64}
    return Loop(
        runner,
        SchedulerConfig(**(options | scheduler)),
        CacheConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_groups=MAX_NUM_SEQS,
            num_checkpoints=num_checkpoints,
            enable_prefix_caching=num_checkpoints > 0,
        ),
    )


PROMPTS = [[(7 * i + 3 * n) % VOCABULARY for i in range(n)] for n in (1, 5, 17, 40, 23)]
NUM_TOKENS = 18


@pytest.fixture(scope="module")
def references(runner: ModelRunner) -> list[list[int]]:
    """Each token from a prefill of all before it."""
    outputs = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens += loop(runner).run(make_sequence(0, tokens, 1))[0]
        outputs.append(tokens[len(prompt) :])
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    return outputs


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked"])
@pytest.mark.parametrize("num_blocks", [32, 7])
def test_state_follows_its_sequence(
    runner: ModelRunner, references: list[list[int]], depth: int, policy: str, num_blocks: int
) -> None:
    """Alone or together, in chunks, and computed again after a preemption (7 blocks are too few for all)."""
    mine = loop(runner, num_blocks, async_depth=depth, scheduling_policy=policy, max_prefill_chunk=11)
    tokens = mine.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)), each_step=2)
    assert tokens == dict(enumerate(references))
    assert (mine.scheduler.load().num_preemptions > 0) == (num_blocks == 7)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [32, 7])
def test_what_begins_alike_goes_on_from_a_state_that_was_kept(
    runner: ModelRunner, references: list[list[int]], depth: int, num_blocks: int
) -> None:
    mine = loop(runner, num_blocks, NUM_CHECKPOINTS, async_depth=depth, max_prefill_chunk=11)
    mine.run(*(make_sequence(i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)), each_step=2)
    tokens = mine.run(*(make_sequence(10 + i, prompt, NUM_TOKENS) for i, prompt in enumerate(PROMPTS)))
    assert tokens == {first + i: output for first in (0, 10) for i, output in enumerate(references)}
    assert num_blocks == 7 or mine.scheduler.load().num_prefix_hits == 16 + 32 + 16


@pytest.mark.parametrize("options", [{"enable_prefix_caching": True}, {"num_host_blocks": 4}])
def test_prefix_reuse_and_swap_are_refused_while_state_is_not_checkpointed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="state"):
        CacheConfig(**({"num_blocks": 8, "num_groups": 4, "enable_prefix_caching": False} | options))
