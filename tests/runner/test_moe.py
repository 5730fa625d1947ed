"""Mixtures of experts against `transformers`' own modules: routing, shared experts, layouts of checkpoints, shards."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from transformers import Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from tests.runner.stored import Stored
from tests.runner.thread_ranks import run_ranks
from worker.attention.context import ForwardContext, forward_context
from worker.kernels.select import Kernels
from worker.layers.experts import HF_NAMES, ExpertsLayout, apart, interleaved, stacked
from worker.layers.moe import MoeBlock
from worker.layers.norm import RMSNorm
from worker.layers.setup import LayerSetup
from worker.layers.weighted import weight_targets
from worker.loader.checkpoint import fill
from worker.loader.experts import ExpertsConfig
from worker.models.weights import pack_weights
from worker.parallel.group import ALONE, Group

CPU = torch.device("cpu")
HIDDEN, INNER, NUM, TOP_K = 48, 32, 8, 3
EPS = 1e-6
SIZES = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PLAIN = ExpertsConfig(num_experts=NUM, top_k=TOP_K, intermediate_size=INNER)
GLM = ExpertsConfig(
    num_experts=NUM, top_k=TOP_K, intermediate_size=INNER, is_sigmoid=True, has_correction=True, num_groups=4,
    num_top_groups=2, scale=1.5, has_float32_router=True, shared_size=INNER,
)  # fmt: skip
QWEN_NEXT = ExpertsConfig(
    num_experts=NUM, top_k=TOP_K, intermediate_size=INNER, shared_size=64, has_shared_gate=True
)  # fmt: skip
GPT_OSS = ExpertsConfig(
    num_experts=NUM, top_k=TOP_K, intermediate_size=INNER, has_bias=True, swiglu_alpha=1.702, swiglu_limit=0.5
)
Names = Callable[[str, Tensor], dict[str, Tensor]]


def names_apart(name: str, tensor: Tensor, names: tuple[str, str, str] = HF_NAMES) -> dict[str, Tensor]:
    if name == "experts.gate_up_proj":
        parts = {names[0]: tensor[:, : tensor.shape[1] // 2], names[1]: tensor[:, tensor.shape[1] // 2 :]}
    elif name == "experts.down_proj":
        parts = {names[2]: tensor}
    else:
        return {name: tensor}
    return {f"experts.{e}.{part}.weight": value[e] for part, value in parts.items() for e in range(len(value))}


def as_stored(name: str, tensor: Tensor) -> dict[str, Tensor]:
    renamed = name.replace("router.", "gate.").replace("shared_expert.", "shared_experts.")
    return {renamed: tensor}


MIXTRAL_NAMES = ("w1", "w3", "w2")
CASES: dict[str, tuple[Callable[[], nn.Module], ExpertsConfig, ExpertsLayout, Names]] = {
    "qwen3": (
        lambda: Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**SIZES, num_experts=NUM, norm_topk_prob=True)),
        PLAIN, apart, names_apart,
    ),
    "mixtral": (
        lambda: MixtralSparseMoeBlock(MixtralConfig(**SIZES, intermediate_size=INNER, num_local_experts=NUM)),
        PLAIN, partial(apart, names=MIXTRAL_NAMES), partial(names_apart, names=MIXTRAL_NAMES),
    ),
    "glm4": (
        lambda: Glm4MoeMoE(
            Glm4MoeConfig(
                **SIZES, n_routed_experts=NUM, n_group=4, topk_group=2, routed_scaling_factor=1.5, n_shared_experts=1
            )
        ),
        GLM, apart, names_apart,
    ),
    "qwen3-next, stacked": (
        lambda: Qwen3NextSparseMoeBlock(
            Qwen3NextConfig(**SIZES, num_experts=NUM, norm_topk_prob=True, shared_expert_intermediate_size=64)
        ),
        QWEN_NEXT, stacked, as_stored,
    ),
    "gpt-oss, interleaved": (
        lambda: GptOssMLP(
            GptOssConfig(
                hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM, num_experts_per_tok=TOP_K,
                swiglu_limit=0.5, num_hidden_layers=1, num_attention_heads=2,
            )
        ),
        GPT_OSS, interleaved, as_stored,
    ),
}  # fmt: skip


class InMemory:
    """A `Checkpoint`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: Stored(tensor) for name, tensor in tensors.items()}

    def names(self) -> Iterable[str]:
        return self.tensors

    def tensor(self, name: str, packed: bool = False) -> Stored:
        return self.tensors[name]


class Reference:
    """A module of transformers with random weights, behind a norm, and tokens."""

    def __init__(self, case: str) -> None:
        make, self.config, self.layout, names = CASES[case]
        generator = torch.Generator().manual_seed(0)
        self._module = make().float().eval()
        tensors = self._module.state_dict()
        for tensor in tensors.values():
            tensor.normal_(0, 0.2, generator=generator)
        self._stored: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            self._stored |= names(name, tensor)
        self.norm = torch.rand(HIDDEN, generator=generator) + 0.5
        self.x = torch.randn(9, HIDDEN, generator=generator)
        self.residual = torch.randn(9, HIDDEN, generator=generator)

    def checkpoint(self) -> InMemory:
        return InMemory(self._stored)

    @torch.inference_mode()
    def expected(self) -> Tensor:
        hidden = nn.functional.rms_norm(self.x + self.residual, (HIDDEN,), self.norm, EPS)
        found = self._module(hidden[None])
        return (found[0] if isinstance(found, tuple) else found)[0]


def make_block(
    reference: Reference, checkpoint: InMemory, tp: Group = ALONE, ep: Group = ALONE, dp: Group = ALONE
) -> tuple[MoeBlock, RMSNorm]:
    setup = LayerSetup(Kernels(CPU), tp, torch.float32, ep=ep, dp=dp)
    block, norm = MoeBlock(setup, HIDDEN, reference.config, reference.layout), RMSNorm(setup, HIDDEN, EPS)
    with torch.inference_mode():
        norm.weight.copy_(reference.norm)
        fill(weight_targets(block), checkpoint)
        pack_weights(block)
    return block, norm


@torch.inference_mode()
def run(block: MoeBlock, norm: RMSNorm, x: Tensor, residual: Tensor) -> Tensor:
    return block(norm, x.clone(), residual.clone())[0]


@pytest.mark.parametrize("case", CASES)
def test_a_block_equals_transformers(case: str) -> None:
    reference = Reference(case)
    found = run(*make_block(reference, reference.checkpoint()), reference.x, reference.residual)
    torch.testing.assert_close(found, reference.expected(), rtol=1e-5, atol=1e-5)


def num_read(checkpoint: InMemory) -> int:
    """Of the experts' weights."""
    return sum(stored.num_read for name, stored in checkpoint.tensors.items() if name.startswith("experts"))


def on_two_ranks(reference: Reference, *, by_expert: bool) -> list[tuple[Tensor, int]]:
    """What each tensor-parallel rank makes of a share of x: its part of the sum, and how much it read."""

    def work(rank: int, group: dist.ProcessGroup, _store: Store) -> tuple[Tensor, int]:
        tp = Group(rank, 2, group)
        checkpoint = reference.checkpoint()
        block, norm = make_block(reference, checkpoint, tp, tp if by_expert else ALONE)
        return run(block, norm, reference.x / 2, reference.residual), num_read(checkpoint)

    return run_ranks(2, work)


@pytest.mark.parametrize("by_expert", [False, True], ids=["parts of each expert", "experts"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_experts_out_and_read_their_own_alone(case: str, by_expert: bool) -> None:
    reference = Reference(case)
    (first, num_first), (second, num_second) = on_two_ranks(reference, by_expert=by_expert)
    torch.testing.assert_close(first + second, reference.expected(), rtol=1e-5, atol=1e-5)
    checkpoint = reference.checkpoint()
    make_block(reference, checkpoint)
    # All of them, and the bias of what they add up to on one rank.
    biases = NUM * HIDDEN if reference.config.has_bias else 0
    assert num_first + num_second == num_read(checkpoint)
    assert num_first - num_second == (0 if by_expert else biases)


@pytest.mark.parametrize("case", ["qwen3", "glm4"])
def test_tokens_of_data_parallel_ranks_find_the_experts_of_all(case: str) -> None:
    """One has 6 tokens, the other 3, and both pass 7 on."""
    reference = Reference(case)
    bounds = [slice(0, 6), slice(6, 9)]

    def work(rank: int, group: dist.ProcessGroup, _store: Store) -> Tensor:
        both = Group(rank, 2, group)
        block, norm = make_block(reference, reference.checkpoint(), ep=both, dp=both)
        own = bounds[rank]
        return run(block, norm, reference.x[own], reference.residual[own])

    with forward_context(ForwardContext((), num_exchanged=7)):
        found = torch.cat(run_ranks(2, work))
    torch.testing.assert_close(found, reference.expected(), rtol=1e-5, atol=1e-5)


def test_a_number_of_experts_that_ranks_cannot_share() -> None:
    setup = LayerSetup(Kernels(CPU), ALONE, torch.float32, ep=Group(0, 3))
    with pytest.raises(ValueError, match="8 experts cannot be divided over 3 ranks"):
        MoeBlock(setup, HIDDEN, PLAIN)
