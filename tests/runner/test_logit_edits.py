"""Penalties, bias and what must not come: against `transformers`' own processors and by hand."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.runner.sampling_rig import SAMPLER, noise, rows_of, sample_rows, sequence
from worker.core.batch import NewSequence
from worker.core.params import SamplingParams
from worker.kernels.sampling import FAILED
from worker.kernels.torch.sample import masked_copy
from worker.sampling import edits as logit_edits
from worker.sampling.sampler import NOTHING_ALLOWED

INF = torch.inf
GREEDY = {"temperature": 0.0}


def edited(logits: Tensor, sequences: list[NewSequence]) -> Tensor:
    rows = rows_of(sequences, logits.shape[1])
    assert rows.rules.edited is not None
    result = logits.clone()
    copy, is_finite = SAMPLER.edited(logits, rows, rows.rules.edited)
    assert is_finite.all()
    group = rows.rules.edited.group.rows
    return copy if group is None else result.index_copy_(0, group, copy)


def test_the_penalties_of_case_34() -> None:
    """vllm#1424: repetition sees prompt and output, presence and frequency the output alone."""
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    repetition = sequence(0, SamplingParams(repetition_penalty=2.0), [0], [2])
    presence = sequence(0, SamplingParams(presence_penalty=1.0), [0], [2])
    assert edited(logits, [repetition]).tolist() == [[1.0, 1.0, -2.0]]
    assert edited(logits, [presence]).tolist() == [[2.0, 1.0, -2.0]]


def test_frequency_counts_and_presence_does_not() -> None:
    logits = torch.zeros(2, 4)
    rows = [
        sequence(0, SamplingParams(frequency_penalty=0.5), [3], [1, 1, 2, 1]),
        sequence(1, SamplingParams(presence_penalty=0.5), [3], [1, 1, 2, 1]),
    ]
    assert edited(logits, rows).tolist() == [[0, -1.5, -0.5, 0], [0, -0.5, -0.5, 0]]


def test_all_three_penalties_on_a_token_of_prompt_and_output() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)
    assert edited(torch.tensor([[8.0, -8.0, 8.0]]), [sequence(0, params, [0, 1], [0, 0])]).tolist() == [[2.5, -16, 8]]


def test_a_prompt_without_output_has_no_output_penalties() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert edited(torch.ones(1, 3), [sequence(0, params, [0, 1])]).tolist() == [[1, 1, 1]]


def test_rows_in_turns_equal_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = noise(7, 50)
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    rows = [sequence(i, params, range(i, i + 4), [i, i, 9]) for i in range(7)]
    together = edited(logits, rows)
    monkeypatch.setattr(logit_edits, "MAX_HISTORY_ELEMENTS", 15)
    assert torch.equal(edited(logits, rows), together)


def test_each_edit_equals_that_of_transformers() -> None:
    vocab_size, eos = 40, 7
    generator = torch.Generator().manual_seed(1)
    logits = noise(6, vocab_size, seed=5)
    bad = ((3,), (4, 5), (1, 2, 3))
    params = SamplingParams(
        repetition_penalty=1.4, logit_bias=((3, 2.5), (9, -4.0)), bad_token_sequences=bad, temperature=0.0
    )
    histories = [torch.randint(0, 6, (5 + i,), generator=generator).tolist() for i in range(4)]
    histories += [[0, 1, 2], [0, 0, 4]]  # ends that complete a bad sequence
    prompt_lens = [3, 3, 3, 3, 1, 2]
    rows = [
        sequence(i, params, ids[:num], ids[num:], min_length=num + 4, ending_token_ids=(eos,))
        for i, (ids, num) in enumerate(zip(histories, prompt_lens, strict=True))
    ]
    found = edited(logits, rows)
    for i, (ids, num) in enumerate(zip(histories, prompt_lens, strict=True)):
        oracle = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}),
                RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
                NoBadWordsLogitsProcessor([list(ids) for ids in bad], eos_token_id=[]),
                MinNewTokensLengthLogitsProcessor(num, 4, eos, device="cpu"),
            ]
        )
        expected = oracle(torch.tensor([ids]), logits[i : i + 1].clone())
        torch.testing.assert_close(found[i : i + 1], expected)


def test_bad_sequences_begin_in_the_prompt_and_need_all_their_beginning() -> None:
    params = SamplingParams(bad_token_sequences=((1, 2, 3),))
    rows = [
        sequence(0, params, [0, 1], [2]),  # begun in the prompt
        sequence(1, params, [2]),  # shorter than the beginning
        sequence(2, params, [1, 2, 0]),
        sequence(3, params, [1, 2]),  # the prompt alone
    ]
    assert edited(torch.zeros(4, 4), rows)[:, 3].tolist() == [-INF, 0, 0, -INF]


def test_a_bad_sequence_of_one_token_repeated_is_not_completed_by_a_shorter_text() -> None:
    params = SamplingParams(bad_token_sequences=((1, 1, 3),))
    rows = [sequence(0, params, [1]), sequence(1, params, [1, 1]), sequence(2, params, [1], [1, 1])]
    assert edited(torch.zeros(3, 4), rows)[:, 3].tolist() == [0, -INF, -INF]


def test_allowed_tokens_keep_their_logits_and_banned_ones_lose_them() -> None:
    logits = torch.arange(5.0).expand(3, -1)
    rows = [
        sequence(0, SamplingParams(allowed_token_ids=(1, 3))),
        sequence(1, SamplingParams(banned_token_ids=(4, 0))),
        sequence(2, SamplingParams(allowed_token_ids=(1, 3), banned_token_ids=(3,), logit_bias=((1, 10.0), (4, 99.0)))),
    ]
    assert edited(logits, rows).tolist() == [[-INF, 1, -INF, 3, -INF], [-INF, 1, 2, 3, -INF], [-INF, 11, *[-INF] * 3]]


def test_endings_do_not_come_before_min_tokens() -> None:
    """Case 44: two end-of-sequence ids; the third token may be one."""
    logits = torch.tensor([[0.0, 5.0, 6.0]])
    params = SamplingParams(**GREEDY)

    def token(output: list[int]) -> int:
        row = sequence(0, params, [0, 0], output, min_length=2 + 3, ending_token_ids=(1, 2))
        return int(sample_rows(logits, [row]).token_ids)

    assert [token([0] * num) for num in range(5)] == [0, 0, 0, 2, 2]


@pytest.mark.parametrize(
    "params", [SamplingParams(**GREEDY), SamplingParams(seed=3), SamplingParams(seed=3, top_p=0.5)]
)
def test_a_row_that_allows_nothing_has_no_token_and_its_neighbours_do(params: SamplingParams) -> None:
    logits = noise(3, 300)
    rows = [sequence(i, params) for i in range(3)]
    expected = sample_rows(logits, rows).token_ids.tolist()
    contradiction = SamplingParams(
        temperature=params.temperature, seed=params.seed, top_p=params.top_p,
        allowed_token_ids=(3,), banned_token_ids=(3,),
    )  # fmt: skip
    rows[1] = sequence(1, contradiction)
    assert sample_rows(logits, rows).token_ids.tolist() == [expected[0], NOTHING_ALLOWED, expected[2]]
    logits[1, 4] = torch.nan  # the model's fault comes first
    assert sample_rows(logits, rows).token_ids.tolist() == [expected[0], FAILED, expected[2]]


def test_a_mask_leaves_the_tokens_whose_bits_are_set() -> None:
    vocab_size = 70  # no whole number of words
    allowed = torch.zeros(2, 96, dtype=torch.bool)
    allowed[0, [0, 31, 32, 69]] = True
    allowed[1] = True
    words = (allowed.view(2, 3, 32).long() << torch.arange(32)).sum(-1)
    mask = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    logits = noise(2, vocab_size)
    expected = logits.masked_fill(~allowed[:, :vocab_size], -INF)
    copy, _ = masked_copy(logits, None, 2, mask)
    assert torch.equal(copy, expected)


def test_a_row_alone_equals_the_row_among_rows_with_other_rules() -> None:
    vocab_size = 500
    logits = noise(7, vocab_size)
    many = [
        SamplingParams(**GREEDY),
        SamplingParams(seed=1, repetition_penalty=1.5, top_p=0.9),
        SamplingParams(seed=2, presence_penalty=1.0, frequency_penalty=-0.5, top_k=9),
        SamplingParams(seed=3, logit_bias=((5, 4.0),), min_p=0.02),
        SamplingParams(seed=4, allowed_token_ids=tuple(range(100)), num_logprobs=3),
        SamplingParams(seed=5, bad_token_sequences=((4, 5), (1,))),
        SamplingParams(seed=6, num_logprobs=0),
    ]
    prompts = [[i, 4, 5, i] for i in range(7)]
    together = sample_rows(logits, [sequence(i, p, prompts[i], [4]) for i, p in enumerate(many)])
    alone = [sample_rows(logits[i : i + 1], [sequence(0, p, prompts[i], [4])]) for i, p in enumerate(many)]
    assert together.token_ids.tolist() == [int(row.token_ids) for row in alone]


def test_a_token_beyond_the_vocabulary_touches_no_other_row() -> None:
    """Nobody should send one. Its place would be that of token 1 in the next row."""
    beyond = 4 + 1
    params = SamplingParams(
        logit_bias=((beyond, 7.0), (0, 1.0)), banned_token_ids=(beyond, 3), bad_token_sequences=((beyond,), (0, beyond))
    )
    first = sequence(0, params, [0], ending_token_ids=(2, beyond), min_length=9)
    assert edited(torch.zeros(2, 4), [first, sequence(1, SamplingParams())]).tolist() == [[1, 0, -INF, -INF], [0] * 4]


def test_only_tokens_beyond_the_vocabulary_allowed_is_nothing_allowed() -> None:
    row = sequence(0, SamplingParams(allowed_token_ids=(5,)))
    assert edited(torch.zeros(2, 4), [row, sequence(1, SamplingParams())]).tolist() == [[-INF] * 4, [0] * 4]
