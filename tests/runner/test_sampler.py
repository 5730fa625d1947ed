"""Sampling: right distribution, independent of the batch, whatever the parameters."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.runner.sampling_rig import chi_squared, fits, many_draws, noise, sample, sequence
from worker.core.params import SamplingParams
from worker.kernels.sampling import FAILED
from worker.kernels.torch.random import random_uniform

GREEDY = SamplingParams(temperature=0.0)
MANY = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=5),
    SamplingParams(seed=3, top_p=0.7),
    SamplingParams(seed=4, min_p=0.05),
    SamplingParams(seed=5, temperature=2.5, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(seed=2**64 - 1, temperature=0.3),
    SamplingParams(seed=6, temperature=50.0, top_p=0.999),
]


@pytest.mark.parametrize("vocab_size", [5, 256, 1000, 8193])
def test_a_row_alone_equals_the_row_in_any_batch(vocab_size: int) -> None:
    logits = noise(len(MANY), vocab_size)
    for position in range(20):
        together = sample(logits, MANY, [position] * len(MANY))
        alone = [sample(logits[i : i + 1], [p], [position])[0] for i, p in enumerate(MANY)]
        turned = sample(logits.flip(0), MANY[::-1], [position] * len(MANY))[::-1]
        assert together == alone == turned


def test_greedy_is_argmax() -> None:
    logits = noise(4, 8193)
    assert sample(logits, [GREEDY] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-12, 1e-7, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_temperature_equals_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = (noise(3, 8193) * 20).to(dtype).float()
    # Ties are common in low precision; the greedy token is any of the best.
    tokens = sample(logits, [SamplingParams(temperature=temperature, seed=i) for i in range(3)])
    assert logits.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist() == logits.max(-1).values.tolist()


@pytest.mark.parametrize("fill", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("params", [GREEDY, MANY[1], MANY[5]])
def test_row_that_is_not_finite_fails_and_its_neighbours_do_not_change(fill: float, params: SamplingParams) -> None:
    logits = noise(3, 8193)
    expected = sample(logits, [params] * 3)
    logits[1] = fill
    assert sample(logits, [params] * 3) == [expected[0], FAILED, expected[2]]


def test_one_nan_among_finite_logits_fails_the_row() -> None:
    logits = noise(2, 8193)
    logits[0, 8192] = torch.nan
    tokens = sample(logits, [GREEDY, GREEDY])
    assert tokens[0] == FAILED and tokens[1] == int(logits[1].argmax())


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [3, 290]] = 0.0
    drawn = {sample(logits, [SamplingParams(seed=s)])[0] for s in range(50)}
    assert drawn == {3, 290}


def test_the_last_token_of_an_odd_vocabulary_can_be_drawn() -> None:
    logits = torch.zeros(1, 8193)
    logits[0, 8192] = 30.0
    assert sample(logits, [SamplingParams(seed=1)]) == [8192]


def test_top_k_of_one_is_greedy() -> None:
    logits = noise(1, 999)
    assert {sample(logits, [SamplingParams(seed=s, top_k=1)])[0] for s in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [8193, 8194, 10**7])
def test_top_k_of_the_vocabulary_or_more_restricts_nothing(top_k: int) -> None:
    logits = noise(2, 8193)
    free = SamplingParams(seed=11)
    wide = SamplingParams(seed=11, top_k=top_k)
    for position in range(10):
        assert sample(logits, [wide, MANY[2]], [position] * 2) == sample(logits, [free, MANY[2]], [position] * 2)


def test_top_p_below_the_best_tokens_share_keeps_the_best() -> None:
    logits = noise(1, 999)
    for top_p in (0.0, 1e-6):
        drawn = {sample(logits, [SamplingParams(seed=s, top_p=top_p)])[0] for s in range(20)}
        assert drawn == {int(logits.argmax())}


CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=6),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=9, top_p=0.85, min_p=0.05),
}


def warped_softmax(logits: Tensor, params: SamplingParams) -> Tensor:
    """What `transformers` would draw from; logits [V], in float64."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(warpers(torch.empty(1, 0, dtype=torch.int64), logits[None].double())[0], -1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocab_size", [16, 600])
def test_draws_follow_the_distribution(case: str, vocab_size: int) -> None:
    """Chi-squared with fixed seeds; the bound is 5 standard deviations above the mean."""
    params, num = CASES[case], 20_000
    logits = torch.full((1, vocab_size), -torch.inf)
    places = torch.linspace(0, vocab_size - 1, 16).long()
    logits[0, places] = noise(1, 16, seed=3)[0] / 2
    p = warped_softmax(logits[0], params)
    assert fits(many_draws(logits, sequence(0, params), num), p)


def test_draws_after_penalties_and_bias_follow_the_distribution() -> None:
    """Everything at once, against `transformers`: repetition penalty, bias, then the warpers."""
    vocab_size, num, prompt = 600, 20_000, [3, 77, 3, 400]
    params = SamplingParams(
        repetition_penalty=1.5, logit_bias=((400, 1.0), (5, 2.0)), temperature=0.8, top_k=30, top_p=0.9, min_p=0.02
    )
    logits = noise(1, vocab_size, seed=8) / 2
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}),
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        ]
    )
    p = warped_softmax(processors(torch.tensor([prompt]), logits.clone())[0], params)
    assert fits(many_draws(logits, sequence(0, params, prompt), num), p)


def test_large_vocabulary_draws_follow_the_distribution() -> None:
    """Both levels of the race matter: 40 chunks of different mass."""
    logits = noise(1, 10_000, seed=9)
    num, params = 4000, SamplingParams()
    tokens = many_draws(logits, sequence(0, params), num)
    p = torch.softmax(logits[0].double(), -1)
    every = torch.arange(10_000)
    for group_of in (every % 16, every // 640):
        expected = torch.zeros(16, dtype=torch.float64).index_add_(0, group_of, p)
        counts = group_of[tokens].bincount(minlength=16).double()
        assert chi_squared(counts, expected) < 15 + 5 * 30**0.5


def test_uniform_numbers_depend_on_seed_position_stream_and_index_alone() -> None:
    seeds, positions = torch.tensor([5, -1, 5]), torch.tensor([9, 9, 10])
    numbers = random_uniform(seeds, positions, 0, 64)
    assert torch.equal(numbers[1:2], random_uniform(seeds[1:2], positions[1:2], 0, 64))
    assert torch.equal(numbers[:, :16], random_uniform(seeds, positions, 0, 16))
    assert numbers.unique().numel() == numbers.numel()
    assert not torch.isin(random_uniform(seeds, positions, 1, 64), numbers).any()


def test_uniform_numbers_are_uniform_over_positions_and_over_indices() -> None:
    across = random_uniform(torch.zeros(50_000, dtype=torch.int64), torch.arange(50_000), 0, 1)[:, 0]
    along = random_uniform(torch.tensor([1]), torch.tensor([1]), 0, 50_000)[0]
    over_seeds = random_uniform(torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64), 0, 1)[:, 0]
    for numbers in (across, along, over_seeds):
        assert numbers.min() > 0 and numbers.max() < 1
        counts = (numbers * 100).long().bincount(minlength=100).double()
        assert chi_squared(counts, torch.full((100,), 0.01, dtype=torch.float64)) < 99 + 5 * 198**0.5


def test_the_stream_of_random_numbers_is_pinned() -> None:
    """Workers of different versions must agree: a seeded request may move from one to another."""
    bits = (random_uniform(torch.tensor([42]), torch.tensor([3]), 0, 3) * 2**52 - 0.5).long()
    assert bits.tolist() == [[3088236329221683, 4454193770797269, 2651310993663262]]
