"""Groups of sequences: what members share, what is one of theirs alone, what is left of one resumes."""

import pytest

from fissile.v1 import FinishReason, SamplingParams, Sequence
from tests.worker.harness import expected, group, quiet, run_all, run_worker, sequence
from worker.face import convert_group
from worker.face.convert_sampling import check_token_ids

LENGTH = FinishReason.FINISH_REASON_LENGTH


def run_and_count(message):
    """(what the router got, how many tokens were computed)"""

    async def scenario(system):
        before = system.executor.runner.num_tokens
        router = await run_all(system, message)
        await quiet(system)
        return router, system.executor.runner.num_tokens - before

    return run_worker(scenario)


def test_members_of_a_group_share_the_prompt():
    """n = 3: the prompt is computed once, the completions differ by seed."""
    message = group(3, 32)

    router, num_computed = run_and_count(message)
    assert [router.tokens[id] for id in (1, 2, 3)] == [expected(message, 4, index) for index in range(3)]
    assert [router.ended[id].index for id in (1, 2, 3)] == [0, 1, 2]
    # The prompt once, its last token again for each of the others, three further tokens for each.
    assert num_computed == 32 + 2 + 3 * 3


def test_log_probabilities_of_the_prompt_are_the_first_ones_affair():
    """The others find what it has computed: to report them again, they would compute all of it, though cached."""
    message = group(3, 32, max_tokens=1, sampling=SamplingParams(num_prompt_logprobs=0))

    router, num_computed = run_and_count(message)
    assert [router.tokens[id] for id in (1, 2, 3)] == [expected(message, 1, index) for index in range(3)]
    assert num_computed == 32 + 2 * 16


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_is_left_of_a_group_resumes(prefix_caching):
    """Its worker was lost when one had ended and the others had different numbers of tokens (E6)."""
    whole = group(4, 32, max_tokens=9)
    tokens = [expected(whole, 9, index) for index in range(4)]
    left = [
        Sequence(id=10 * index, index=index, seed=whole.sequences[index].seed, token_ids=tokens[index][:num])
        for index, num in ((1, 5), (2, 0), (3, 8))
    ]

    async def scenario(system):
        router = await run_all(system, group(left, list(whole.prompt_token_ids), max_tokens=9))
        await quiet(system)
        return router

    router = run_worker(scenario, enable_prefix_caching=prefix_caching)
    assert [router.tokens[id] for id in (10, 20, 30)] == [tokens[1][5:], tokens[2], tokens[3][8:]]
    assert [router.outputs_of(id)[0].token_offset for id in (10, 20, 30)] == [5, 0, 8]
    assert [router.ended[id].index for id in (10, 20, 30)] == [1, 2, 3]


def test_a_beam_search_ends_with_its_hypotheses():
    sampling = SamplingParams()
    sampling.beam_search.width = 3

    async def scenario(system):
        return await run_all(system, sequence(1, sampling=sampling))

    router = run_worker(scenario)
    (output,) = router.outputs_of(1)
    assert not output.token_ids
    assert [len(hypothesis.token_ids) for hypothesis in output.hypotheses] == [4, 4, 4]
    scores = [hypothesis.score for hypothesis in output.hypotheses]
    assert scores == sorted(scores, reverse=True)
    assert {hypothesis.finish_reason for hypothesis in output.hypotheses} == {LENGTH}


def test_the_prompt_of_a_group_is_checked_once(monkeypatch):
    """n = 128 of a long prompt costs the event loop about what one costs (A12)."""
    checked = []

    def check(field, token_ids, vocab_size):
        checked.append((field, len(token_ids)))
        check_token_ids(field, token_ids, vocab_size)

    monkeypatch.setattr(convert_group, "check_token_ids", check)
    message = group(8, 40, max_tokens=1)

    async def scenario(system):
        checked.clear()
        return await run_all(system, message)

    router = run_worker(scenario)
    assert {router.tokens[id][0] for id in range(1, 9)} == {expected(message, 1, index)[0] for index in range(8)}
    assert [field for field, size in checked if size] == ["prompt_token_ids"]
    assert message.ByteSize() < group(1, 40).ByteSize() + 8 * 12
