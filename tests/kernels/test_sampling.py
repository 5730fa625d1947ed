"""Choosing tokens, the masked copy and log probabilities: every backend against torch on the CPU, and against float64.

Backends may differ where rounding decides: a token's weight may be off by 1e-6 of itself, so a race whose winner leads
by less, or a top-p whose threshold leaves a share within 1e-6 of p, may come out either way. Thresholds are compared
exactly on logits that keep clear of that.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.rig import IS_INTERPRETED
from tests.kernels.sampling_rig import GREEDY, MANY, Asks, draws_of
from worker.kernels.sampling import CHOOSE, FAILED, LOGPROBS, MASKED_COPY
from worker.kernels.select import Kernels
from worker.kernels.step import SlotTables
from worker.kernels.torch import sample as torch_sample


def choose(kernels: Kernels, logits: Tensor, rows: list[Asks], positions: list[int] | None = None) -> list[int]:
    """As rows 1, 2, … of a larger tensor."""
    device = kernels.device
    among = torch.cat((torch.full_like(logits[:1], torch.nan), logits)).to(device)
    index = torch.arange(1, len(among), device=device)
    draws = draws_of(rows, positions or [7] * len(rows), logits.shape[1], device)
    return kernels.choose(CHOOSE, None, torch.float32)(among, index, draws).tolist()


def noise(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(5, torch.float32), (256, torch.float32), (1000, torch.float16), (8193, torch.float32)]
)
def test_tokens_equal_torchs_on_the_cpu(kernels: Kernels, vocab_size: int, dtype: torch.dtype) -> None:
    logits = noise(len(MANY), vocab_size, seed=vocab_size).to(dtype)
    reference = Kernels(torch.device("cpu"), "torch")
    assert choose(kernels, logits, MANY) == choose(reference, logits, MANY)


def test_a_row_alone_equals_the_row_in_any_batch(kernels: Kernels) -> None:
    logits = noise(6, 3000)
    some = MANY[:6]
    together = choose(kernels, logits, some)
    assert together == [choose(kernels, logits[i : i + 1], [asks])[0] for i, asks in enumerate(some)]


def test_slots_remember_what_was_chosen(kernels: Kernels) -> None:
    """At the rows' positions; of a row that failed a 0. The tokens go where they are to be, which may be the host."""
    device, some = kernels.device, [GREEDY, *MANY[:3]]
    logits = noise(len(some), 600).to(device)
    logits[0, 5] = torch.nan
    positions = [3, 0, 8, 5]
    draws = draws_of(some, positions, 600, device)
    tokens = torch.full((6, 9), 5, dtype=torch.int32, device=device)
    lengths, none = torch.full((6,), 2, device=device), torch.empty(0, device=device)
    tables = SlotTables(tokens, lengths, none, none)
    out = torch.empty(len(some), dtype=torch.int64, pin_memory=device.type == "cuda")
    assert kernels.choose(CHOOSE, None, torch.float32)(logits, None, draws, tables, out) is out
    if device.type == "cuda":
        torch.cuda.synchronize()
    chosen = out.to(device)
    assert chosen[0] == FAILED and chosen.tolist() == choose(kernels, logits.cpu(), some, positions)
    expected = torch.full_like(tokens, 5)
    expected[draws.slots, draws.positions] = chosen.clamp(min=0).int()
    assert torch.equal(tokens, expected)
    assert lengths.tolist() == [*(draws.positions + 1).flip(0).tolist(), 2, 2]


def test_of_equal_logits_the_first_is_the_greedy_token(kernels: Kernels) -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [300, 301, 999]] = 2.0
    assert choose(kernels, logits, [GREEDY] * 2) == [300, 0]


@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_fails_its_row_alone(kernels: Kernels, fill: float) -> None:
    rows = [*MANY[:4], MANY[3]]
    logits = noise(len(rows), 600)
    expected = choose(kernels, logits, rows)
    for row in (0, 3):
        logits[row, 500] = fill
    logits[2] = -torch.inf
    assert choose(kernels, logits, rows) == [FAILED, expected[1], FAILED, FAILED, expected[4]]


TRUNCATED = {
    "top-k": (Asks(top_k=3), 3),
    "top-k with ties": (Asks(top_k=5), 6),
    "top-p": (Asks(top_p=0.6), 2),
    "top-p with ties": (Asks(top_p=0.95), 6),
    "top-p of what top-k left": (Asks(top_k=3, top_p=0.8), 2),
    "min-p": (Asks(min_p=0.3), 2),
}
"""What is asked → how many tokens stay of weights 8, 4, 2, 1, 1/2, 1/2, then 2⁻²⁰ each."""


@pytest.mark.parametrize("case", TRUNCATED)
@pytest.mark.parametrize("room", ["enough", "too little"])
def test_what_stays_is_drawn_and_nothing_else(
    kernels: Kernels, case: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, num_kept = TRUNCATED[case]
    kernels.choose(CHOOSE, None, torch.float32)
    if room == "too little":
        if kernels.describe()["choose"] != "triton":
            pytest.skip("nothing has a room")
        monkeypatch.setattr("worker.kernels.triton.sample_limits.ROOM", 1)
    vocab_size, num = 600, 6 if IS_INTERPRETED else 400
    weights = torch.full((vocab_size,), 2.0**-20)
    places = [599, 2, 300, 256, 255, 1]
    weights[places] = torch.tensor([8, 4, 2, 1, 0.5, 0.5])
    logits = weights.log().expand(num, -1)
    tokens = choose(kernels, logits, [asks] * num, list(range(num)))
    kept = places[:num_kept]
    shares = weights[kept].double() / weights[kept].double().sum()
    counts = torch.tensor([tokens.count(token) for token in kept])
    assert counts.sum() == num
    chi_squared = ((counts - num * shares) ** 2 / (num * shares)).sum()
    assert chi_squared < num_kept - 1 + 5 * (2 * (num_kept - 1)) ** 0.5


@pytest.fixture
def little_room(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many candidates with a bound as wide as a flat row's; few in any narrow interval."""
    kernels.choose(CHOOSE, None, torch.float32)
    if kernels.describe()["choose"] != "triton":
        pytest.skip("nothing has a room")
    monkeypatch.setattr("worker.kernels.triton.sample_limits.ROOM", 64)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize(("scale", "has_ties"), [(0.01, False), (1.0, False), (1.0, True), (100.0, True)])
def test_rows_with_more_candidates_than_room_among_others(kernels: Kernels, scale: float, has_ties: bool) -> None:
    """Most of these are narrowed, over two tiles; a greedy row, a plain draw and a small top-k are not. With ties, no
    interval is narrow enough."""
    logits = noise(len(MANY), 4500)
    if has_ties:
        logits = logits.round()
    logits *= scale
    reference = Kernels(torch.device("cpu"), "torch")
    assert choose(kernels, logits, MANY) == choose(reference, logits, MANY)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("asks", [Asks(top_p=0.9, temperature=2.0), Asks(top_k=30), Asks(top_k=30, top_p=0.5)])
def test_a_row_with_few_allowed_tokens_and_more_than_room(kernels: Kernels, asks: Asks) -> None:
    """Of two chunks with a finite token: too few to bound a top-k by."""
    logits = torch.full((4, 2000), -torch.inf)
    logits[:, 300:700] = noise(4, 400)
    reference = Kernels(torch.device("cpu"), "torch")
    positions = list(range(4))
    assert choose(kernels, logits, [asks] * 4, positions) == choose(reference, logits, [asks] * 4, positions)


def test_masked_copy(kernels: Kernels) -> None:
    vocab_size = 70  # no whole number of words
    logits = noise(4, vocab_size).half()
    logits[3, 5] = torch.nan
    mask = torch.randint(-(2**31), 2**31 - 1, (2, 3), generator=torch.Generator().manual_seed(1)).int()
    rows = torch.tensor([2, 3])
    copy = kernels.choose(MASKED_COPY, None, torch.float32)
    device = kernels.device
    got, is_finite = copy(logits.to(device), rows.to(device), 2, mask.to(device))
    allowed = ((mask[:, :, None] >> torch.arange(32)) & 1).flatten(1)[:, :vocab_size] == 1
    assert torch.equal(got[0].cpu(), logits[2].float().masked_fill(~allowed[0], -torch.inf))
    assert is_finite.tolist() == [True, False]
    plain, _ = copy(logits.to(device), None, 3, None)
    assert torch.equal(plain.cpu(), logits[:3].float())


@pytest.mark.parametrize("most", [0, 1, 20, 33])
@pytest.mark.parametrize("vocab_size", [40, 1000])
def test_logprobs(kernels: Kernels, most: int, vocab_size: int) -> None:
    logits = noise(4, vocab_size)
    rows, chosen = torch.tensor([3, 0, 2]), torch.tensor([0, -1, vocab_size - 1])
    device = kernels.device
    logprobs_of = kernels.choose(LOGPROBS, None, torch.float32)
    ids, logprobs, ranks = (t.cpu() for t in logprobs_of(logits.to(device), rows.to(device), chosen.to(device), most))
    exact = logits[rows].double().log_softmax(-1)
    best = exact.topk(most)
    assert torch.equal(ids, torch.cat((chosen.clamp(min=0)[:, None], best.indices), 1))
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), atol=1e-5, rtol=0)
    order = exact.argsort(-1, descending=True).argsort(-1) + 1
    assert torch.equal(ranks, order.gather(1, ids))


def test_equal_logits_share_the_better_rank_and_come_in_order_of_ids(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]], device=kernels.device)
    ids, _, ranks = kernels.choose(LOGPROBS, None, torch.float32)(
        logits, None, torch.tensor([2], device=kernels.device), 3
    )
    assert ranks.tolist() == [[1, 1, 2, 3]]
    assert set(ids[0, 1:3].tolist()) == {1, 2}


def test_random_bits_of_kernels_are_those_of_torch(kernels: Kernels) -> None:
    """Uniform logits: the race is decided by the random numbers alone, over 12 chunks and all members."""
    num = 12
    rows = [Asks(seed=seed * 10**18 - 6 * 10**18) for seed in range(num)]
    logits = torch.zeros(num, 3000)
    assert (
        choose(kernels, logits, rows)
        == torch_sample.choose(logits, None, draws_of(rows, [7] * num, 3000, torch.device("cpu"))).tolist()
    )


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make kernels")
def test_kernels_compile_for_nvidia(tmp_path: Path) -> None:
    """In a process of its own: one that interprets kernels cannot compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_sampling"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 10 and min(sizes.values()) > 0
