"""Where a sequence ends without a stop of its own: the context, the cache, what came with it."""

from fissile.v1 import FinishReason
from tests.worker.harness import run_all, run_worker, sequence


def test_no_limit_means_what_the_context_leaves():
    """Case 11."""
    message = sequence(1, 60)
    message.ClearField("max_tokens")

    async def scenario(system):
        return await run_all(system, message)

    router = run_worker(scenario)
    assert len(router.tokens[1]) == 4
    assert router.ended[1].finish_reason == FinishReason.FINISH_REASON_MODEL_LENGTH


def test_no_limit_means_at_most_what_the_cache_holds(caplog):
    message = sequence(1, 5)
    message.ClearField("max_tokens")

    async def scenario(system):
        return await run_all(system, message)

    router = run_worker(scenario, num_blocks=2)
    assert len(router.tokens[1]) == 2 * 16 + 1 - 5
    assert "the cache holds 32 tokens, less than one context of 64" in caplog.text
    assert router.ended[1].finish_reason == FinishReason.FINISH_REASON_MODEL_LENGTH


def test_what_came_with_tokens_beyond_the_cache_ends_where_it_is():
    """The worker that it comes from had more room, and no limit was sent."""
    message = sequence(1, 5, generated=tuple(range(30)))
    message.ClearField("max_tokens")

    async def scenario(system):
        return await run_all(system, message)

    router = run_worker(scenario, num_blocks=2)
    assert (router.tokens[1], router.ended[1].token_offset) == ([], 30)
    assert router.ended[1].finish_reason == FinishReason.FINISH_REASON_MODEL_LENGTH
