"""Experts in Triton: all tiles, sorting by blocks of pairs, the router's product behind its norm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.experts_rig import SPEC, Experts
from tests.kernels.rig import BACKENDS, DTYPES, Rig
from worker.kernels.experts import ROUTE_EXPERTS, ExpertsSpec, RouteSpec
from worker.kernels.select import Kernels
from worker.kernels.weights import Dense
from worker.runner.rehearsal import MAX_TOKENS

DEVICES = [torch.device(device) for name, device in BACKENDS if name == "triton"]
pytestmark = pytest.mark.skipif(not DEVICES, reason="needs an NVIDIA GPU, or Triton's interpreter: make kernels")


@pytest.fixture(params=DTYPES, ids=str)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(Kernels(DEVICES[0], "triton"), request.param)


@pytest.mark.parametrize(("num_tokens", "rows"), [(12, 16), (30, 32), (60, 64), (130, 128)])
def test_experts_of_more_rows_have_larger_tiles(rig: Rig, num_tokens: int, rows: int) -> None:
    from worker.kernels.triton.experts_tiles import tiles_of

    spec = replace(SPEC, hidden_size=80, intermediate_size=48)
    experts = Experts(rig, spec, num_tokens)
    if rig.dtype != torch.float32:
        tiles = tiles_of(num_tokens, spec, experts.kernel._machine, rig.dtype)
        assert tiles.gate.rows == tiles.down.rows == rows
    rig.assert_close(experts(), experts.exact())


def test_tiles_of_half_of_the_experts_are_those_of_all() -> None:
    """Of as many tokens: each expert has as many pairs."""
    from worker.kernels.triton.experts_tiles import tiles_of
    from worker.kernels.triton.machine import Machine

    machine = Machine(num_sms=132, shared_memory=232_448, can_overlap=True)
    every = ExpertsSpec(128, 2048, 768, 8)
    half = replace(every, num_experts=64, first_expert=64, num_elsewhere=64)
    for num_tokens in (1, 64, 128, 256, 1000, 8192):
        assert tiles_of(num_tokens, half, machine, torch.bfloat16) == tiles_of(
            num_tokens, every, machine, torch.bfloat16
        )


@pytest.mark.parametrize("num_tokens", [101, 1100])
def test_pairs_are_sorted_by_blocks(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    """Each expert's pairs in their order, then its tiles; what is left of the table is marked."""
    from worker.kernels.triton import experts_sort

    monkeypatch.setattr(experts_sort, "BLOCK", 128)
    ids = torch.randint(0, 9, (num_tokens, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found = experts_sort.sort_pairs(ids.to(DEVICES[0]), 2, 5, 16, overlaps=False)
    flat, pairs, tiles = ids.flatten().tolist(), [], []
    for expert in range(5):
        mine = [pair for pair, number in enumerate(flat) if number == expert + 2]
        end = len(pairs) + len(mine)
        tiles += [[expert, start, min(start + 16, end)] for start in range(len(pairs), end, 16)]
        pairs += mine
    assert found.pairs[: len(pairs)].tolist() == pairs
    assert found.tiles[: len(tiles), :3].tolist() == tiles
    assert found.tiles[len(tiles) :, 0].tolist() == [-1] * (len(found.tiles) - len(tiles))


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_router_behind_a_norm(rig: Rig, num_tokens: int) -> None:
    route = rig.choose(ROUTE_EXPERTS, RouteSpec(10, 2))
    x, residual, weight = rig.noise(num_tokens, 40), rig.noise(num_tokens, 40, seed=1), rig.noise(40, seed=2)
    router, bias = rig.noise(10, 40, seed=3).float(), rig.noise(10, seed=4).float()
    found = route.of_norm(x, residual, weight, 1e-6, router, bias)
    assert found is not None
    logits, hidden, total = found
    assert logits.dtype == torch.float32
    rig.assert_close(total, x.double() + residual.double())
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    rig.assert_close(hidden, exact)
    torch.testing.assert_close(logits.double(), hidden.double() @ router.double().T + bias, rtol=1e-5, atol=1e-5)


def test_kernels_of_all_steps_are_those_of_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `rehearse` asks for them."""
    from worker.kernels.triton import experts, experts_sort
    from worker.kernels.triton.experts import TritonExperts
    from worker.kernels.triton.machine import Machine

    asked: set[tuple[object, ...]] = set()

    class Noted:
        """In place of a kernel: what it would be compiled with."""

        def __init__(self, kernel: Any) -> None:
            self._name = kernel.fn.__name__
            self._constants = [i for i, name in enumerate(kernel.arg_names) if name.isupper()]

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: asked.add(
                (self._name, *(given[i] for i in self._constants), *sorted(options.items()))
            )

    for module, names in (
        (experts, ("gate_kernel", "down_kernel", "grouped_kernel", "sum_kernel")),
        (experts_sort, ("_count_kernel", "_sort_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Noted(getattr(module, name)))
    machine = Machine(num_sms=132, shared_memory=232_448, can_overlap=True)
    for spec in (ExpertsSpec(128, 2048, 768, 8), ExpertsSpec(512, 2048, 512, 10), ExpertsSpec(8, 4096, 14336, 2)):
        kernel, meta = TritonExperts(spec, machine, torch.bfloat16), torch.empty(0, device="meta")
        packed = Dense(meta), Dense(meta)

        def ask(
            num_tokens: int, kernel: TritonExperts = kernel, spec: ExpertsSpec = spec, packed: Any = packed
        ) -> None:
            x = torch.empty(num_tokens, spec.hidden_size, device="meta")
            kernel(x, x, torch.empty(num_tokens, spec.top_k, device="meta"), packed)

        asked.clear()
        for power in range(MAX_TOKENS.bit_length()):
            ask(1 << power)
        ahead = set(asked)
        for num_tokens in (*range(1, 700), *range(700, 9000, 37)):
            ask(num_tokens)
        assert asked == ahead
