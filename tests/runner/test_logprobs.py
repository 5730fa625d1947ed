"""Log probabilities are the model's own, with ranks, for any number and any other parameter."""

import pytest
import torch

from tests.runner.sampling_rig import noise, sample_rows, sequence
from worker.core.params import SamplingParams
from worker.kernels.torch.sample import token_logprobs
from worker.sampling.logprobs import LogprobTensors


@pytest.mark.parametrize("most", [0, 1, 5, 40])
def test_values_and_ranks_equal_those_of_a_sort(most: int) -> None:
    logits = noise(3, 40)
    chosen = torch.tensor([0, 17, 39])
    expected = torch.log_softmax(logits.double(), -1)
    order = expected.argsort(-1, descending=True)
    entries = LogprobTensors(*token_logprobs(logits, None, chosen, most)).to_host()
    for row, token in enumerate(chosen.tolist()):
        first, *best = entries[row]
        assert (first[0], first[2]) == (token, order[row].tolist().index(token) + 1)
        assert [(token, rank) for token, _, rank in best] == [(int(order[row, i]), i + 1) for i in range(most)]
        for token, value, _ in entries[row]:
            assert value == pytest.approx(float(expected[row, token]), abs=1e-5)


def test_equal_logits_share_the_better_rank() -> None:
    entries = LogprobTensors(
        *token_logprobs(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), None, torch.tensor([2]), 1)
    ).to_host()
    assert [rank for *_, rank in entries[0]] == [1, 1]


@pytest.mark.parametrize(
    "others",
    [
        {"top_p": 0.1},
        {"temperature": 0.0},
        {"temperature": 5.0, "top_k": 3},
        {"logit_bias": ((11, 100.0),)},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"allowed_token_ids": (11, 12)},
    ],
    ids=str,
)
def test_sampling_parameters_do_not_touch_them(others: dict[str, object]) -> None:
    """Case 37: the chosen token is always there, and the whole sums to 1."""
    vocab_size = 50
    logits = noise(2, vocab_size)
    params = SamplingParams(seed=1, num_logprobs=vocab_size, **others)  # type: ignore[arg-type]
    sampled = sample_rows(logits, [sequence(0, SamplingParams()), sequence(1, params, [3, 11], [12])])
    assert sampled.logprobs is not None
    ((chosen, *best),) = sampled.logprobs.to_host()
    expected = torch.log_softmax(logits[1], -1)
    assert chosen[0] == int(sampled.token_ids[1])
    assert chosen[1] == pytest.approx(float(expected[chosen[0]]), abs=1e-5)
    assert best[chosen[2] - 1][0] == chosen[0]
    assert sum(torch.tensor([value for _, value, _ in best]).exp()) == pytest.approx(1, abs=1e-5)


def test_more_than_there_are_tokens_are_as_many_as_there_are() -> None:
    sampled = sample_rows(noise(1, 8), [sequence(0, SamplingParams(num_logprobs=10**6))])
    assert sampled.logprobs is not None and len(sampled.logprobs.to_host()[0]) == 1 + 8
