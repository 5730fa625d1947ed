"""Experts in whole numbers on a CPU, against float64 of what the numbers mean."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.experts_rig import CLAMPED, SPEC, Experts
from tests.kernels.rig import CPU, HAS_NATIVE, Rig
from tests.runner.rounding import rounded_rows
from tests.runner.whole_scales import product_as_kept
from worker.kernels.experts import EXPERTS, ExpertsSpec, ExpertWeights
from worker.kernels.select import Kernels
from worker.kernels.weights import Blocks, Dense, Grouped

BACKENDS = ["torch", "native"] if HAS_NATIVE else ["torch"]
FORMS = [(4, 32), (8, 32), (8, 16), (4, 128)]
KEPT = replace(SPEC, hidden_size=128, intermediate_size=256, kind=Grouped)


class KeptExperts(Experts):
    """The same in blocks, gates and ups in one form, downs in another, and what they are exactly: native kernels round
    each row to 8 bits before a product."""

    def __init__(
        self, backend: str, spec: ExpertsSpec, num_tokens: int, forms: tuple[tuple[int, int], tuple[int, int]]
    ) -> None:
        rig = Rig(Kernels(CPU, backend), torch.float32)
        super().__init__(rig, replace(spec, kind=Dense), num_tokens)
        self.rounds = backend == "native"
        both = [in_blocks(each, *form) for each, form in zip((self.gate_up, self.down), forms, strict=True)]
        self.gate_up, self.down = (experts_of(blocks, spec.num_experts) for blocks in both)
        gate_up, down = (Grouped.of_blocks(blocks).by_expert(spec.num_experts) for blocks in both)
        if self.rounds:
            self.x = rounded_rows(self.x)
        self.kernel = rig.choose(EXPERTS, spec)
        biases = self.gate_up_bias, self.down_bias
        self.packed = self.kernel.pack(ExpertWeights(gate_up.with_bias(biases[0]), down.with_bias(biases[1])))

    def _product(self, weight: Blocks, x: Tensor) -> Tensor:
        return product_as_kept(x[None], weight)[0] if self.rounds else weight.floats().double() @ x

    def assert_close(self, got: Tensor, ids: Tensor | None = None) -> None:
        """Where a number is halfway between two of 8 bits, float32 may choose the other one: a step of one input."""
        exact = self.exact(ids)
        assert (got.double() - exact).abs().max() < (1e-3 if self.rounds else 2e-6) * exact.abs().max()


def experts_of(blocks: Blocks, num: int) -> list[Blocks]:
    size = len(blocks.numbers) // num
    return [blocks.select(slice(i * size, (i + 1) * size)) for i in range(num)]


def in_blocks(weight: Tensor, bits: int, block: int) -> Blocks:
    """Of all experts. Blocks of 16 and of 128 have other scales than those of 32 would."""
    flat = weight.flatten(0, 1)
    if block == 16:
        blocks = Blocks.of(flat, bits).in_form(bits, 16)
        blocks.scales[:, ::2] *= 0.5
    else:
        blocks = Blocks.of(flat, bits)
        step = block // 32
        blocks = Blocks(blocks.numbers, blocks.scales[:, ::step], blocks.minima[:, ::step], bits)
    return blocks


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("forms", [(FORMS[0], FORMS[2]), (FORMS[1], FORMS[0]), (FORMS[3], FORMS[1])], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts(backend: str, forms: tuple[tuple[int, int], tuple[int, int]], num_tokens: int) -> None:
    """With biases."""
    experts = KeptExperts(backend, replace(KEPT, has_bias=True), num_tokens, forms)
    experts.assert_close(experts())


@pytest.mark.parametrize(("activation", "clamped"), [("gelu_tanh", None), ("silu", CLAMPED)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_curves(backend: str, activation: str, clamped: object) -> None:
    spec = replace(KEPT, activation=activation, clamped=clamped)
    experts = KeptExperts(backend, spec, 9, (FORMS[0], FORMS[0]))
    experts.assert_close(experts())


@pytest.mark.parametrize("size", [2.0**-20, 2.0**50])
@pytest.mark.parametrize(("activation", "clamped"), [("silu", None), ("gelu_tanh", None), ("silu", CLAMPED)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_of_any_size(backend: str, activation: str, clamped: object, size: float) -> None:
    """NaN is NaN, and in its own token."""
    spec = replace(KEPT, activation=activation, clamped=clamped)
    experts = KeptExperts(backend, spec, 9, (FORMS[0], FORMS[0]))
    experts.x *= size
    experts.assert_close(experts())
    experts.x[4, 7] = torch.nan
    assert experts().isnan().all(-1).nonzero().tolist() == [[4]]
    assert experts()[torch.arange(9) != 4].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_of_other_ranks_add_nothing(backend: str) -> None:
    experts = KeptExperts(backend, replace(KEPT, first_expert=6), 40, (FORMS[0], FORMS[1]))
    ids = (experts.ids + torch.arange(40)[:, None] * 3) % 18
    experts.assert_close(experts(ids), ids)
    assert torch.equal(experts(torch.full_like(ids, -1)), torch.zeros(40, 128))


@pytest.mark.skipif(not HAS_NATIVE, reason="needs AVX2 and a C++ compiler")
@pytest.mark.parametrize("kind", [Grouped, Dense])
def test_a_token_is_the_same_alone_and_among_more_than_go_through_together(kind: type) -> None:
    """To the bit, wherever it stands."""
    spec = replace(KEPT, hidden_size=64, intermediate_size=32)
    experts: Experts = KeptExperts("native", spec, 1100, (FORMS[0], FORMS[1]))
    if kind is Dense:
        experts = Experts(experts.rig, replace(spec, kind=Dense), 1100)
    together = experts()
    for token in (0, 7, 1023, 1024, 1099):
        alone = slice(token, token + 1)
        arguments = experts.x[alone], experts.weights[alone], experts.ids[alone], experts.packed
        assert torch.equal(experts.kernel(*arguments), together[alone])


def test_shapes_that_no_block_fills_stay_plain() -> None:
    for backend in BACKENDS:
        kernels = Kernels(CPU, backend)
        assert kernels.find(EXPERTS, replace(KEPT, intermediate_size=48), torch.float32) is None
        assert kernels.find(EXPERTS, replace(KEPT, hidden_size=48), torch.float32) is None
