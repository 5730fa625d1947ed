"""Routing to experts and the experts themselves, against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.experts_rig import CLAMPED, SPEC, Experts
from tests.kernels.rig import Rig
from worker.kernels.experts import (
    ROUTE_EXPERTS,
    ClampedSwiglu,
    RouteSpec,
)
from worker.kernels.select import Kernels

ROUTES = {
    "softmax": RouteSpec(12, 3, is_normalised=False),
    "softmax of the chosen": RouteSpec(12, 3),
    "sigmoid": RouteSpec(12, 5, is_sigmoid=True, is_normalised=False),
    "scaled": RouteSpec(12, 4, is_sigmoid=True, scale=2.5),
    "groups": RouteSpec(12, 4, is_sigmoid=True, num_groups=4, num_top_groups=2, scale=1.5),
    "many": RouteSpec(160, 8),
}


def exact_route(spec: RouteSpec, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A row at a time, by sorting."""
    weights, ids = [], []
    for row in logits.double():
        scores = row.sigmoid() if spec.is_sigmoid else row.softmax(0)
        choice = scores if bias is None else scores + bias.double()
        groups = choice.view(spec.num_groups, -1)
        best = groups.sort(descending=True).values[:, :2].sum(1).sort(descending=True).indices[: spec.num_top_groups]
        allowed = [e for e in range(spec.num_experts) if e // groups.shape[1] in best.tolist()]
        chosen = sorted(allowed, key=lambda e, choice=choice: -choice[e].item())[: spec.top_k]
        shares = scores[chosen]
        weights.append((shares / shares.sum() if spec.is_normalised else shares) * spec.scale)
        ids.append(torch.tensor(chosen))
    return torch.stack(weights), torch.stack(ids)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("spec", ROUTES.values(), ids=ROUTES.keys())
def test_route(kernels: Kernels, spec: RouteSpec, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(17, spec.num_experts, generator=generator)
    bias = torch.randn(spec.num_experts, generator=generator) if has_bias else None
    route = kernels.choose(ROUTE_EXPERTS, spec, torch.float32)
    weights, ids = route(logits.to(kernels.device), None if bias is None else bias.to(kernels.device))
    exact_weights, exact_ids = exact_route(spec, logits, bias)
    assert weights.dtype == torch.float32
    order, exact_order = ids.cpu().long().sort(), exact_ids.sort()
    assert torch.equal(order.values, exact_order.values)
    got, expected = weights.cpu().gather(1, order.indices), exact_weights.gather(1, exact_order.indices)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)


def test_experts_of_equal_scores_are_chosen_once(kernels: Kernels) -> None:
    route = kernels.choose(ROUTE_EXPERTS, RouteSpec(12, 4), torch.float32)
    weights, ids = route(torch.zeros(3, 12, device=kernels.device))
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in ids.tolist())
    torch.testing.assert_close(weights.cpu(), torch.full((3, 4), 0.25))


def test_logits_may_have_the_models_dtype(rig: Rig) -> None:
    route = rig.choose(ROUTE_EXPERTS, RouteSpec(12, 4))
    logits = rig.noise(5, 12)
    weights, ids = route(logits)
    assert weights.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip((weights, ids), route(logits.float()), strict=True))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("shape", [(48, 32), (64, 160)], ids=str)
def test_experts(rig: Rig, shape: tuple[int, int], num_tokens: int) -> None:
    spec = replace(SPEC, hidden_size=shape[0], intermediate_size=shape[1])
    experts = Experts(rig, spec, num_tokens)
    rig.assert_close(experts(), experts.exact())


@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
def test_biases_and_clamped_gates(rig: Rig, clamped: ClampedSwiglu | None, num_tokens: int) -> None:
    experts = Experts(rig, replace(SPEC, has_bias=True, clamped=clamped), num_tokens)
    rig.assert_close(experts(), experts.exact())


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_gelu(rig: Rig, num_tokens: int) -> None:
    experts = Experts(rig, replace(SPEC, activation="gelu_tanh"), num_tokens)
    rig.assert_close(experts(), experts.exact())


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_one_expert_may_take_all(rig: Rig, num_tokens: int) -> None:
    """A token's other experts are nobody's, or other ranks'."""
    experts = Experts(rig, SPEC, num_tokens)
    ids = torch.tensor([[-1, 4, 99]] * num_tokens, device=rig.device)
    rig.assert_close(experts(ids), experts.exact(ids))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_experts_of_other_ranks_add_nothing(rig: Rig, num_tokens: int) -> None:
    experts = Experts(rig, replace(SPEC, first_expert=6), num_tokens)
    ids = (experts.ids + torch.arange(num_tokens, device=rig.device)[:, None] * 3) % 18
    rig.assert_close(experts(ids), experts.exact(ids))
    nobody = experts(torch.full_like(ids, -1))
    assert torch.equal(nobody, torch.zeros_like(nobody))


@pytest.mark.parametrize("num_tokens", [2, 20])
def test_result_into_a_place_of_the_callers(rig: Rig, num_tokens: int) -> None:
    experts = Experts(rig, SPEC, num_tokens)
    place = torch.full((num_tokens, 48), torch.nan, dtype=rig.dtype, device=rig.device)
    assert experts(experts.ids.int(), place).data_ptr() == place.data_ptr()
    rig.assert_close(place, experts.exact())


@pytest.mark.parametrize("num_tokens", [2, 20])
def test_what_one_token_is_does_not_touch_the_others(rig: Rig, num_tokens: int) -> None:
    """Padding may be NaN, and route anywhere."""
    experts = Experts(rig, SPEC, num_tokens)
    experts.x[0], experts.weights[0] = torch.nan, torch.nan
    rig.assert_close(experts()[1:], experts.exact()[1:])
